"""How little a start does: one trace for all that is measured and for training, and a bound that bounds."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import qsync
from qsync.records.profiles import Profile


def mse(model, batch):
    return (model(batch) ** 2).mean()


def start(cache, size: int = 32, **options):
    """Plan a small model, train it for two steps, and return how many graphs were traced for it."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    batch = torch.randn(size, 64)
    model = qsync.hybrid(model, batch, mse, cache_dir=cache, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
    return model, counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.2")


def test_planning_and_training_share_one_trace(tmp_path):
    """Tracing a diffusion model took 20 s, and a start did it four times."""
    model, traced = start(tmp_path)
    assert traced == 1
    for size in (8, 5):  # what comes later is traced as ever: at most once more for all lengths
        assert model(torch.randn(size, 64)).shape == (size, 8)
    assert counters["stats"]["unique_graphs"] <= 3
    assert start(tmp_path)[1] == 1, "the plan is kept, and training goes on with the graph that was compared"


def test_a_bound_of_no_time_leaves_what_every_plan_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0")
    start(tmp_path, precisions=["fp32", "bf16"], slack=0.0)
    (file,) = tmp_path.glob("*/profile-*.json")
    profile = Profile.load(file)
    assert set(profile.step_s) == {"fp32", "bf16"}, "no mixtures"
    assert all({"fp32", "bf16"} <= set(modes) for modes in profile.ops.values() if len(modes) > 1)


def test_equal_ranks_take_a_round_and_no_more(tmp_path, monkeypatch):
    """One class without a target: no choice hangs on the times."""
    monkeypatch.setenv("QSYNC_PROFILE_S", "60")
    start(tmp_path, precisions=["fp32", "bf16"])
    (file,) = tmp_path.glob("*/profile-*.json")
    assert Profile.load(file).num_steps < 60  # 12 rounds of six steps, each with its twins, are some 300

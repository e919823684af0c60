"""Data loading: what a step waits for its next batch is measured where the step pays it, and only there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

import qsync
from qsync.errors import CalibrationError
from qsync.predictor.profiling.loader_wait import TimedLoader, endless
from qsync.records.profiles import Profile


class Told:
    """A clock that shows what it is told."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


def test_a_wait_is_the_median_fetch_once_workers_have_nothing_in_store():
    clock = Told()
    waits = [9.0, 0.0, 0.0, 0.0, 2.0, 3.0, 2.0, 8.0]

    def loader() -> Iterator[int]:
        for batch, wait in enumerate(waits):
            clock.time += wait
            yield batch

    loading = TimedLoader(loader(), clock)
    for batch in range(len(waits)):
        assert loading.fetch() == batch
        clock.time += 100.0  # the step
    assert loading.wait_s == 2.5


def test_a_loader_that_ends_is_begun_again():
    assert list(islice(endless([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "the loader gives no batch; pass what"),
        (iter([1, 2]), "ended after 2 batches and cannot be begun again; pass one that can"),
        (3, "is a int that cannot be iterated"),
    ],
)
def test_a_loader_that_cannot_go_on_is_one_sentence(loader, message):
    with pytest.raises(CalibrationError, match=message):
        list(islice(endless(loader), 3))


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((8,), float(index))


def own_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_a_profile_knows_how_long_its_loader_takes():
    model, batch = nn.Linear(8, 8), torch.randn(2, 8)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2)
    state = torch.get_rng_state()
    profile = qsync.profile(model, batch, own_loss, precisions=["fp32"], rounds=1, loader=loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert profile.loading_s >= 2 * 0.002
    assert Profile.from_json(profile.to_json()) == profile
    without = qsync.profile(model, batch, own_loss, precisions=["fp32"], rounds=1)
    assert without.loading_s == 0.0
    assert "loading_s" not in without.to_json()  # as in files from before there was such a field
    with pytest.raises(CalibrationError, match="gives no batch"):
        qsync.profile(model, batch, own_loss, precisions=["fp32"], rounds=1, loader=[])


def test_hybrid_plans_with_the_loader_and_not_with_a_plan_made_without(tmp_path):
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2)
    for given in (None, loader):
        torch.manual_seed(0)
        qsync.hybrid(
            nn.Linear(8, 8),
            torch.randn(2, 8),
            own_loss,
            precisions=["fp32"],
            cache_dir=tmp_path,
            loader=given,
        )
    profiles = [Profile.load(path) for path in tmp_path.glob("*/profile-*.json")]
    without, waiting = sorted(profile.loading_s for profile in profiles)
    assert without == 0.0 and waiting >= 2 * 0.002


class Augmented(torch.utils.data.Dataset):
    """Rows that are drawn from all random states."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = random.random() + float(np.random.rand())
        return {"x": torch.randn(8) + drawn, "y": torch.tensor(index % 3)}


@pytest.mark.parametrize("own", [False, True], ids=["the global generator", "a generator of its own"])
def test_hybrid_takes_its_batch_from_the_loader_and_draws_nothing(own, tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_PROFILE_S", "1")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1) if own else None
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator)
    model, seen = nn.Linear(8, 3), tmp_path / "batch.pt"

    def loss_fn(model, batch):
        torch.save(batch, seen)  # a list would be put back
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    def states():
        drawn = generator.get_state().tolist() if generator else []
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), drawn

    before = states()
    qsync.hybrid(model, loader=loader, loss_fn=loss_fn, cache_dir=tmp_path)
    assert states() == before
    first = next(iter(loader))  # the loop's own: not another one
    planned = torch.load(seen)
    assert torch.equal(first["x"], planned["x"]) and torch.equal(first["y"], planned["y"])


def test_a_loader_that_can_be_read_once_keeps_its_first_batch(tmp_path):
    loader = iter([torch.randn(4, 8)])
    with pytest.raises(
        CalibrationError, match="planning would use up its first batch; give an example_batch"
    ):
        qsync.hybrid(nn.Linear(8, 3), loader=loader, loss_fn=lambda m, b: m(b).sum(), cache_dir=tmp_path)
    assert next(loader).shape == (4, 8)


def test_a_name_that_is_loaded_when_it_is_used_draws_nothing():
    code = (
        "import random, qsync; before = random.getstate(); qsync.hybrid; print(random.getstate() == before)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"

"""The workloads: deterministic data, splits that share nothing, models that fit their descriptions."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import make_friedman1, make_friedman2

from qsync.errors import QSyncError
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.subjects import DEMO_NAMES, demo_workload
from qsync.experiments.workloads.surrogate import (
    friedman,
    friedman_workload,
    impedance,
    impedance_workload,
)
from qsync.experiments.workloads.text import load_text
from qsync.experiments.workloads.workload import evaluate

MADE = {"friedman": friedman_workload, "impedance": impedance_workload}


@pytest.fixture(scope="module", params=[*DEMO_NAMES, *MADE])
def workload(request):
    return MADE[request.param]() if request.param in MADE else demo_workload(request.param)


def test_batch_is_a_function_of_seed_step_and_rank(workload):
    first = workload.batch(0, 3, 1)
    again = workload.batch(0, 3, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in ((1, 3, 1), (0, 4, 1), (0, 3, 0)):
        assert not torch.equal(first[0], workload.batch(*other)[0])


def test_model_is_a_function_of_the_seed_and_trains_every_parameter(workload):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, two = workload.make_model(5), workload.make_model(5)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    few = tuple(part[:2] for part in workload.batch(0, 0, 0))
    loss = workload.loss(one, few)
    loss.backward()
    assert loss.shape == () and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in one.parameters())


def test_evaluate_is_repeatable_and_puts_the_mode_back():
    workload = demo_workload("resnet-small")
    model = workload.make_model(0)
    assert evaluate(model, workload, num_batches=9) == evaluate(model, workload, num_batches=9)
    assert model.training


@pytest.mark.parametrize(
    ("function", "theirs", "inputs"), [(friedman, make_friedman1, 10), (impedance, make_friedman2, 4)]
)
def test_functions_are_scikit_learn_s_standardized(function, theirs, inputs):
    x, expected = theirs(20_000, random_state=0)
    if inputs == 4:  # given in ohms, radians a second, henrys and farads
        low, width = ([0.0, 40 * math.pi, 0.0, 1.0], [100.0, 520 * math.pi, 1.0, 10.0])
        x = (x - low) / width
    y = function(torch.tensor(x).float()).squeeze(1)
    fitted = torch.tensor((expected - expected.mean()) / expected.std()).float()
    assert (y - fitted).abs().max() < 0.1 and abs(float(y.mean())) < 0.05 and abs(float(y.std()) - 1) < 0.05
    assert torch.corrcoef(torch.stack([y, fitted]))[0, 1] > 0.999999


def test_gpt_has_ten_million_parameters_and_starts_uniform():
    workload = demo_workload("gpt")
    model = workload.make_model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) >= 10_000_000
    assert abs(evaluate(model, workload, num_batches=1) - 5.545) < 0.2  # ln 256


def test_tied_gpt_shares_one_parameter():
    model = Gpt(num_layers=1, width=32, num_heads=2, tied=True)
    assert model.head.weight is model.tokens.weight


def test_targets_are_the_bytes_that_follow_or_the_masked_ones():
    inputs, targets = demo_workload("gpt-small").batch(0, 0, 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    inputs, targets = demo_workload("bert").batch(0, 0, 0)
    masked = targets >= 0
    assert 0.1 < masked.float().mean() < 0.25
    assert (inputs[masked] == 0).all() and (inputs[~masked] != 0).all()


def test_one_file_holds_out_its_last_twentieth(tmp_path):
    path = tmp_path / "mine.bin"
    path.write_bytes(bytes(range(1, 251)) * 100)
    text = load_text(path)
    assert len(text.heldout) == 25_000 // 20
    assert text.train.tobytes() + text.heldout.tobytes() == path.read_bytes()


def test_a_folder_holds_out_whole_files_and_skips_what_is_not_text(tmp_path):
    for i in range(100):
        (tmp_path / f"{i}.txt").write_bytes(f"{i:03d} ".encode() * 200)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    text = load_text(tmp_path)
    train, heldout = (set(part.tobytes().split()) for part in (text.train, text.heldout))
    assert heldout and not train & heldout
    assert len(train | heldout) == 100


def test_a_folder_with_few_files_is_split_by_bytes(tmp_path):
    (tmp_path / "only.txt").write_bytes(b"0123456789" * 1000)
    assert len(load_text(tmp_path).heldout) == 500


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "contains no text"), (b"x" * 100, r"contains 100 bytes.*at least 5,140")]
)
def test_too_little_text_says_how_much_is_needed(tmp_path, content, says):
    (tmp_path / "small.txt").write_bytes(content)
    for data in (tmp_path, tmp_path / "small.txt"):
        with pytest.raises(QSyncError, match=says):
            load_text(data)

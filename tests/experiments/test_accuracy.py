"""Final accuracy: what a step of two ranks computes, what is concluded from losses, and runs in pieces."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import ttest_rel

from qsync.errors import QSyncError
from qsync.experiments.accuracy import __main__ as command
from qsync.experiments.accuracy import report, training
from qsync.experiments.accuracy.methods import METHODS, NAMES
from qsync.experiments.accuracy.tasks import TASKS, task_named
from qsync.experiments.accuracy.training import BothRanks, TrainingRun
from qsync.experiments.harness.ranks import FAST, WEAK
from qsync.experiments.mixed.ways import ALL_INT8, DDP, QSYNC, WEAK_16, WEAK_INT8
from qsync.experiments.workloads.workload import seeded
from qsync.records.json_files import read_json


def method(weak: str = "fp32", samples: tuple[int, int] = (8, 8), fast: str = "fp32") -> dict:
    """A method that runs every linear of the digits' model in a precision."""
    of = lambda precision: {name: precision for name in ("0", "2")}  # noqa: E731
    return {
        "assignments": {FAST: of(fast), WEAK: of(weak)},
        "samples": dict(zip((FAST, WEAK), samples, strict=True)),
    }


@pytest.fixture
def workload(monkeypatch):
    """Digits, by a small model."""
    digits = task_named("vgg").workload()

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(256, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))

    def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = digits.batch(seed, step, rank)
        return images[:8].flatten(1), labels[:8]

    class Small:
        loss_fn, lr, description = staticmethod(torch.nn.functional.cross_entropy), 1e-2, "digits"
        make_model = staticmethod(lambda seed: seeded(make, seed))
        loss = staticmethod(lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
        heldout = staticmethod(lambda num: [(x.flatten(1), y) for x, y in digits.heldout(num)])

    Small.batch = staticmethod(batch)
    task = SimpleNamespace(steps=6, workload=lambda: Small)
    monkeypatch.setattr(training, "task_named", lambda name: task)
    return Small


def gradients(workload, of: dict) -> dict[str, torch.Tensor]:
    ranks = BothRanks(workload.make_model(0), of)
    ranks.step(workload, 0, 0)
    return {name: p.grad.clone() for name, p in ranks.model.named_parameters()}


def test_two_ranks_in_one_process_take_the_mean_over_all_samples(workload):
    plain = workload.make_model(0)
    inputs, labels = (
        torch.cat(parts) for parts in zip(*(workload.batch(0, 0, rank) for rank in (0, 1)), strict=True)
    )
    torch.nn.functional.cross_entropy(plain(inputs), labels).backward()
    for samples in ((8, 8), (12, 4), (16, 0)):
        found = gradients(workload, method(samples=samples))
        for name, p in plain.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-7)


def test_each_rank_runs_in_its_own_precisions(workload):
    full = gradients(workload, method())
    distances = {}
    for name, of in (
        ("weak", method("int8")),
        ("all", method("int8", fast="int8")),
        ("nobody", method("fp32")),
    ):
        found = gradients(workload, of)
        distances[name] = sum(float((found[key] - full[key]).square().sum()) for key in full)
    assert distances["nobody"] == 0.0 < distances["weak"] < distances["all"]


def test_a_run_is_a_function_of_its_seed(workload):
    runs = [training.trained(TrainingRun("digits", method("int8"), seed, 6)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] and runs[0]["final_loss"] != runs[2]["final_loss"]
    assert 0.0 < runs[0]["final_accuracy"] < 1.0


def test_differences_are_paired_with_student_s_interval():
    one, other = [1.0, 1.3, 0.9, 1.4, 1.2], [0.9, 1.1, 0.95, 1.2, 1.0]
    found = report.difference(one, other)
    expected = ttest_rel(one, other).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((expected.low, expected.high))
    assert not found.above and not found.below
    assert (
        report.difference([2.0] * 3, [1.0, 1.0, 1.01]).above
        and report.difference([1.0] * 3, [2.0, 2.1, 2.0]).below
    )
    assert math.isinf(report.difference([1.0], [2.0]).half)


def task_of(seeds: int = 5, **losses: float) -> dict:
    """A task in which methods end with these losses, and a little scatter by seed."""
    steps = {DDP: 1.0, WEAK_16: 0.62, WEAK_INT8: 0.6, ALL_INT8: 0.58, QSYNC: 0.6}

    def run(number: int, name: str, seed: int) -> dict:
        loss = losses.get(name, 1.0)
        final = loss + 1e-3 * seed + 1e-4 * ((seed * number) % 3)
        return {"final_loss": final, "final_accuracy": 0.9}

    runs = {
        name: {str(seed): run(number, name, seed) for seed in range(seeds)}
        for number, name in enumerate(METHODS)
    }
    methods = {name: {"step_s": steps.get(name, 0.7), "added_variance": 1e-3} for name in METHODS}
    return {
        "methods": methods,
        "runs": runs,
        "steps": 20,
        "description": "it",
    }


def test_the_uniform_choice_to_beat_is_the_fastest_that_takes_no_longer():
    assert report.fastest_uniform(task_of()["methods"]) == ALL_INT8
    methods = task_of()["methods"]
    methods[ALL_INT8]["step_s"] = methods[WEAK_INT8]["step_s"] = 0.9
    assert report.fastest_uniform(methods) is None  # 0.62 is more than 2 % longer
    methods[WEAK_16]["step_s"] = 0.61
    assert report.fastest_uniform(methods) == WEAK_16


def test_bars_are_judged_by_intervals_and_only_with_enough_seeds():
    fine = task_of(**{ALL_INT8: 1.2, WEAK_INT8: 1.2})
    above, better, losing = report.bars({"a": fine})
    assert (above["measured"], better["measured"], losing["measured"]) == (0, 1, 0)
    assert len(better["which"]) == 1 and not better["holds"]
    assert report.bars({"a": fine, "b": fine})[1]["holds"]
    above, better, losing = report.bars({"a": task_of(**{QSYNC: 1.1})})
    assert above["which"] == ["a"] and len(losing["which"]) == 1 and not above["holds"]
    assert NAMES[QSYNC] in losing["which"][0] and NAMES[ALL_INT8] in losing["which"][0]
    assert [one["holds"] for one in report.bars({"a": task_of(seeds=4)})] == [None] * 3


def test_the_table_shows_every_method():
    tasks = {"a": task_of(**{ALL_INT8: 1.2}), "b": task_of(**{ALL_INT8: 1.2})}
    names, first, second = report.table(tasks).columns
    assert list(names.cells) == [NAMES[method] for method in METHODS]
    assert list(first.cells) == list(second.cells)
    shown = dict(zip(names.cells, first.cells, strict=True))
    assert shown[NAMES[DDP]] == "1.002 (1.00)"
    assert shown[NAMES[ALL_INT8]].startswith("+") and shown[NAMES[ALL_INT8]].endswith(" (0.58)")
    assert "a: it; 20 steps, 5 seeds." in report.note([], tasks)


@pytest.mark.dist
@pytest.mark.deep
@pytest.mark.timeout(900)
def test_runs_are_pieces_that_continue_and_are_reported(tmp_path, capsys):
    options = {"out": tmp_path, "task": ["vgg"], "tiny": True}
    command.main(**options, seeds=1, processes=2)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "pieces").iterdir()}
    command.main(**options, seeds=2, processes=1)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    content = read_json(tmp_path / "figures.json")
    runs = content["tasks"]["vgg"]["runs"]
    assert set(runs) == set(METHODS) and all(set(seeds) == {"0", "1"} for seeds in runs.values())
    assert content["tasks"]["vgg"]["methods"][DDP]["added_variance"] == 0.0


def test_tasks_are_real_and_unknown_ones_are_refused(tmp_path):
    assert len(TASKS) >= 5
    with pytest.raises(QSyncError, match="unknown task 'imagenet'; choose from gpt"):
        command.main(out=tmp_path, task=["imagenet"])

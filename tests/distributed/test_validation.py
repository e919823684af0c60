"""validate: random plans are really run, and timed phase by phase."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import qsync
from qsync.backend.precisions_that_pay import emulated_precisions
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.errors import CalibrationError, FormatError, QSyncError
from qsync.experiments.prediction.replay_error import judge
from qsync.experiments.prediction.validation_ranks import kinds_table, run_validation, table
from qsync.records.precision import Precision
from qsync.replayer.explanation.comparison import Validation
from qsync.replayer.explanation.phases import median


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


BATCH = (torch.randn(8, 16), torch.randint(0, 4, (8,)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_one_process_validates_alone_and_keeps_the_result(tmp_path):
    loader = torch.utils.data.DataLoader(Counts(), batch_size=None)
    validation, basis = qsync.validate(
        Net(), BATCH, loss, num_plans=3, turns=2, steps=2, folder=tmp_path, loader=loader
    )
    assert len(validation.comparisons) == 3
    assert Validation.load(tmp_path / "validation.json") == validation
    assert (tmp_path / "graph.json").is_file() and basis.profiles
    name = basis.cluster.classes[0].name
    assert basis.profiles[name].loading_s >= 0.005
    for one in validation.comparisons:
        assert one.predicted_s >= 0.005 and one.measured_s >= 0.005  # both wait for the loader
        assert "loading" in one.misses_s[name]
        assert one.measured_s > 0 and one.predicted_s > 0
        products = [kind for kind in one.by_kind[name] if kind.startswith("linear ")]
        assert products and all(one.by_kind[name][kind][1] > 0 for kind in products)
    drawn = {json.dumps(one.assignments, sort_keys=True) for one in validation.comparisons}
    assert len(drawn) > 1
    table(validation), kinds_table(validation)
    again = qsync.validate(Net(), BATCH, loss, num_plans=3, turns=1, steps=1)[0]
    assert [one.assignments for one in again.comparisons] == [
        one.assignments for one in validation.comparisons
    ]


def test_plans_that_are_given_are_run_in_place_of_random_ones():
    name = qsync.capture(Net(), (BATCH[0],)).adjustable[0].name
    given = {"low": {"here": {name: Precision.BF16}}, "high": {"here": {}}}
    options = {"turns": 1, "steps": 1, "device_class": "here", "plans": given}
    validation = qsync.validate(Net(), BATCH, loss, precisions=["fp32", "bf16"], **options)[0]
    low, high = validation.comparisons
    assert (low.name, high.name) == ("low", "high")
    assert low.assignments["here"] == {name: "bf16"} and high.assignments["here"] == {}
    assert "linear bf16" in low.by_kind["here"] and "linear bf16" not in high.by_kind["here"]


def test_phases_add_up_to_periods_and_hooks_are_left_nowhere():
    model = Net()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, Net()))
    timer = PhaseTimer(model, model)
    for _ in range(4):
        for _ in range(2):  # gradient accumulation is one step
            loss(model, BATCH).backward()
        other.step()  # somebody else's
        optimizer.step()
        optimizer.zero_grad()
    timer.settle()
    assert len(timer.steps) == 3  # the first one has no beginning
    step = median(timer.steps)
    assert (
        all(value >= 0 for value in step.to_json().values()) and step.compute_s > 0 and step.optimizer_s > 0
    )
    timer.stop()
    loss(model, BATCH).backward()
    optimizer.step()
    timer.settle()
    assert len(timer.steps) == 3
    assert not model._forward_pre_hooks and not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Counts(torch.utils.data.Dataset):
    """Batches that are tensors by themselves; `made` says in which threads."""

    def __init__(self, inner: torch.utils.data.DataLoader | None = None) -> None:
        self.inner, self.made = inner, []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made.append(threading.get_ident())
        time.sleep(0.005)
        return next(iter(self.inner)) if self.inner else BATCH[0]


def test_what_a_loader_keeps_the_loop_waiting_is_loading_and_the_rest_is_host():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.utils.data.DataLoader(Counts(), batch_size=None)
    loader = torch.utils.data.DataLoader(Counts(inner), batch_size=None)
    asked = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    timer = PhaseTimer(model, model)
    for _ in range(2):  # epochs
        for batch in loader:
            ahead = threading.Thread(target=lambda: next(iter(inner)))  # keeps nobody waiting
            ahead.start()
            ahead.join()
            with timer.fetching():  # what is no DataLoader
                time.sleep(0.005)
            loss(model, (batch, BATCH[1])).backward()
            next(iter(inner))  # after forward: not before the step
            optimizer.step()
    timer.settle()
    assert len(timer.steps) == 5
    for step in timer.steps:
        assert step.loading_s >= 0.015 and step.host_s >= 0.005  # a fetch and its inner one count once
        parts_s = step.forward_s + step.optimizer_cpu_s  # of compute, and of the optimizer
        apart = sum(step.to_json().values()) - parts_s
        assert step.compute_s > 0 and step.period_s == pytest.approx(apart)
    timer.stop()
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is asked


def test_what_happens_before_the_model_inside_is_called_is_communication():
    class Around(nn.Module):  # as DDP, which hands out buffers there
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            return self.inside(x)

    model = Around(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = PhaseTimer(model, model.inside)
    for _ in range(3):
        loss(model, BATCH).backward()
        optimizer.step()
    timer.settle()
    timer.stop()
    assert len(timer.steps) == 2 and all(step.blocked_s >= 0.01 for step in timer.steps)
    assert not model._forward_pre_hooks and not model.inside._forward_pre_hooks


@pytest.mark.dist
@pytest.mark.slow
def test_two_unequal_ranks_are_validated_from_the_command_line(tmp_path):
    out = tmp_path / "vgg-2"
    command = [
        sys.executable,
        "-m",
        "qsync.commands.main",
        "validate",
        "--model",
        "vgg",
        "--plans",
        "2",
        "--turns",
        "1",
    ]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    validation = Validation.load(out / "validation.json")
    assert {c for one in validation.comparisons for c in one.misses_s} == {"train", "infer"}
    assert all("communication" in m for one in validation.comparisons for m in one.misses_s.values())
    assert "random 2" in done.stdout and "kept in" in " ".join(done.stdout.split())
    judged = judge("vgg", 2, out)
    assert judged["errors"]["replay"] == pytest.approx([one.error for one in validation.comparisons])
    # A processor that emulates all lower precisions has plans of FP32 alone, and no casts.
    has_casts = emulated_precisions(torch.device("cpu")) <= {Precision.FP16}
    without = min(judged["errors"]["no casts"])
    assert min(judged["errors"]["replay"]) > without if has_casts else without in judged["errors"]["replay"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": "lstm"}, "no model 'lstm'"),
        ({"model": "gpt", "num_ranks": 3}, "--ranks must be 1 or 2"),
        ({"model": "gpt", "weak_share": 0.0}, "--weak-share must lie in"),
        ({"model": "gpt", "num_plans": 0}, "--plans must be at least 1"),
        ({"model": "gpt", "out": Path(__file__)}, "is a file; name a folder"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, match):
    with pytest.raises(QSyncError, match=match):
        run_validation(**options)


def test_numbers_that_measure_nothing_are_refused():
    with pytest.raises(CalibrationError, match="num_plans must be at least 1, found 0"):
        qsync.validate(Net(), BATCH, loss, num_plans=0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_plans": "3"}, "num_plans must be at least 1, found '3'"),
        ({"turns": float("nan")}, "turns must be at least 1, found nan"),
        ({"steps": -1}, "steps must be at least 1, found -1"),
        ({"plans": {}}, "plans names no plan"),
        ({"emulated_share": float("nan")}, r"emulated_share must lie in \(0, 1\], found nan"),
        ({"emulated_share": 0.0}, r"emulated_share must lie in \(0, 1\], found 0.0"),
        ({"emulated_share": "x" * 5000}, r"emulated_share must lie in .*\(5000 characters\)"),
        ({"device_class": ""}, "device_class must be a name, found ''"),
        ({"device_class": 3}, "device_class must be a name, found 3"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be positive, found nan"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be positive, found -1"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be positive, found '25'"),
        ({"precisions": ["int7"]}, "unknown precision 'int7'"),
    ],
)
def test_bad_keywords_are_one_sentence(options, match):
    with pytest.raises(QSyncError, match=match) as error:
        qsync.validate(Net(), BATCH, loss, **options)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("keyword", ["emulated_share", "device_class", "bucket_cap_mb"])
def test_bad_keywords_of_hybrid_are_one_sentence(keyword):
    with pytest.raises(QSyncError, match=f"{keyword} must"):
        qsync.hybrid(Net(), BATCH, loss, **{keyword: -1})


@pytest.mark.parametrize(
    "options", [{"rounds": "3"}, {"rounds": 0}, {"seconds": float("nan")}, {"seconds": "1"}]
)
def test_bad_keywords_of_profile_are_one_sentence(options):
    with pytest.raises(CalibrationError, match="must be .*at least"):
        qsync.profile(Net(), BATCH, loss, **options)


@pytest.mark.parametrize("plan", [None, 3, {"a": "fp32"}, "int7"])
def test_what_is_no_plan_is_not_run(plan):
    with pytest.raises(FormatError, match="plan must be a qsync.Plan|unknown precision"):
        qsync.wrap(Net(), plan)


def test_a_file_that_cannot_be_read_is_refused():
    body = {"kind": "validation", "version": 1, "model": "m", "machine": {}, "seed": 0, "comparisons": [{}]}
    with pytest.raises(FormatError, match="comparisons, entry 1: object missing required field `name`"):
        Validation.from_json(body)

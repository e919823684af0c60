"""Random plans: drawn alike on every rank, really run, and beside what replay predicts of them."""

from __future__ import annotations

import json

import pytest
import torch
from graphs import cluster_of, mlp
from torch import nn

from qsync.distributed import job
from qsync.distributed.ddp_profiling import ProfileOptions
from qsync.distributed.job_options import HybridOptions
from qsync.experiments.prediction.random_plans import PlanRun, random_plans, run_plans
from qsync.operators.precision import Precision


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_process_runs_plans_alone():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    step = job.TrainingStep(model, (torch.randn(8, 16), torch.randint(0, 4, (8,))), loss)
    options = ProfileOptions(HybridOptions(precisions=["fp32", "bf16"]))
    runs = run_plans(step, job.detect_rank(model, name="here"), options, 3, turns=2)
    assert len(runs) == 3
    assert all(run.measured_s > 0 and run.predicted_s > 0 for run in runs)
    assert {p for run in runs for p in run.assignments["here"].values()} == {"fp32", "bf16"}


def test_plans_are_drawn_from_what_a_class_has_alike_on_every_rank():
    usable = {"train": [Precision.FP32], "infer": [Precision.FP32, Precision.BF16, Precision.INT8]}
    plans = random_plans(mlp(6), cluster_of(), usable, 4, seed=1)
    assert plans == random_plans(mlp(6), cluster_of(), usable, 4, seed=1)
    assert {p for plan in plans for p in plan["train"].values()} == {Precision.FP32}
    assert len({json.dumps(plan["infer"], sort_keys=True) for plan in plans}) > 1


def test_the_ends_of_the_interval_lie_inside():
    def run(measured_s: float) -> PlanRun:
        return PlanRun({}, 1.0, (1.0, 2.0), measured_s)

    assert [run(s).is_inside for s in (0.9, 1.0, 2.0, 2.1)] == [False, True, True, False]
    assert run(2.0).error == pytest.approx(-0.5) and not PlanRun({}, 1.0, None, 1.0).is_inside

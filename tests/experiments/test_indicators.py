"""indicators.py on a tiny network: figures are complete, plans save what they must, reports."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync.experiments.harness.experiment import Experiment
from qsync.experiments.harness.tables import as_markdown
from qsync.experiments.sensitivity import indicators
from qsync.experiments.sensitivity.baselines import INDICATORS
from qsync.experiments.sensitivity.indicator_report import (
    NEAREST,
    geometric,
    mean,
    summary,
    table,
    to_default,
)
from qsync.experiments.sensitivity.indicators import (
    BUDGETS,
    PRECISIONS,
    Scale,
    judge_plans,
    plan_at,
    rate,
    sensitivities,
)
from qsync.experiments.workloads.workload import Workload
from qsync.operators.precision import Precision
from qsync.records.json_files import read_json
from qsync.records.profiles import Sensitivity

SCALE = Scale(warm_up=2, unseen=3, random_plans=2)


def tiny() -> Workload:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))

    def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
        return torch.randn(16, 16, generator=generator), torch.randint(0, 4, (16,), generator=generator)

    def heldout(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [batch(9, step, 9) for step in range(num)]

    return Workload("tiny", make, batch, F.cross_entropy, heldout, 4, 1e-3, "a tiny network")


@pytest.fixture(scope="module")
def rows():
    found = []
    for seed in (0, 1):
        row = sensitivities(tiny(), seed, SCALE, 1)
        found.append({"model": "tiny", "seed": seed, **row, **judge_plans(tiny(), seed, SCALE, row["omega"])})
    return found


def test_every_indicator_is_judged_by_every_figure(rows):
    for row in rows:
        assert set(row["plan_error"]) == set(INDICATORS)
        assert set(row["spearman"]) == set(INDICATORS) - {"empirical"}
        assert all(-1 <= value <= 1 for found in row["spearman"].values() for value in found.values())
        errors = [error for found in row["plan_error"].values() for error in found.values()]
        assert all(len(error) == 3 == len(row["squared_gradient"]) and min(error) > 0 for error in errors)
        assert all(entry["joint"] > 0 and entry["sum"] > 0 for entry in row["joint"])


def test_the_report_has_means_intervals_and_a_table(rows):
    found = summary(rows)
    cell = found["tiny"]["to_default"]["random"][str(BUDGETS[0])]
    assert cell["mean"] > 0 and cell["factor"] >= 1
    assert found["tiny"]["to_default"]["variance"][str(BUDGETS[0])]["mean"] == pytest.approx(1)
    text = as_markdown(table(found))
    # Names of models, Spearman, plans at each saving and the default's own, joint effects.
    others = len(INDICATORS) - 1
    assert text.count("\n| ") == 1 + others + (len(NEAREST) + 1) + (others + 1) + 1


def test_plans_are_compared_batch_by_batch():
    """A batch on which every error is huge counts as much as any other."""
    by_batch = {"variance": [1.0, 1.0, 1e4], "fisher": [2.0, 4.0, 1e4]}
    row = {"plan_error": {name: {"0.3": errors} for name, errors in by_batch.items()}}
    assert to_default(row, "fisher", "0.3") == pytest.approx(2.0)


def test_sensitivities_that_are_there_are_not_measured_again(rows, tmp_path, monkeypatch):
    """An interrupted run continues with its plans."""
    experiment = Experiment("indicators", tmp_path, settings={"scale": asdict(SCALE)})
    experiment.keep("tiny 0 sensitivities", {key: rows[0][key] for key in ("omega", "spearman", "joint")})
    monkeypatch.setattr(indicators, "SCALE", SCALE)
    monkeypatch.setattr(indicators, "BATCHES", {"tiny": (1, 1)})
    monkeypatch.setattr(indicators, "subject", lambda name, size: tiny())
    monkeypatch.setattr(indicators, "sensitivities", lambda *args: pytest.fail("measured again"))
    indicators.main(tmp_path, ["tiny"], seeds=1)
    (row,) = read_json(tmp_path / "figures.json")["rows"]
    assert row["plan_error"] == rows[0]["plan_error"]


def test_means_and_intervals_by_hand():
    assert mean([1.0, 3.0]) == {"mean": 2.0, "half": pytest.approx(12.706, rel=1e-3)}
    assert mean([1.0]) == {"mean": 1.0, "half": None}
    assert geometric([1.0, 4.0])["mean"] == pytest.approx(2.0)


def test_a_plan_saves_its_share_at_least_variance():
    graph = qsync.capture(tiny().make_model(0), torch.randn(16, 16))
    cheap, dear = {"bf16": 1.0, "int8": 2.0}, {"bf16": 100.0, "int8": 200.0}
    first, second, third = (op.name for op in graph.adjustable)  # 512, 512 and 64 products a row
    sensitivity = Sensitivity(graph.hash, "made", {first: cheap, second: dear, third: dear})
    assert plan_at(graph, sensitivity, 0.4) == {
        first: Precision.BF16, second: Precision.FP32, third: Precision.FP32
    }  # fmt: skip
    assert set(plan_at(graph, sensitivity, 1.0).values()) == {Precision.INT8}
    small = {"bf16": 3e-11, "int8": 2e-11}  # among sensitivities of ten decades the least is still found
    sensitivity = Sensitivity(
        graph.hash, "made", {first: small, second: {"bf16": 1e-8, "int8": 1e-7}, third: dear}
    )
    assert plan_at(graph, sensitivity, 0.4) == {
        first: Precision.INT8, second: Precision.FP32, third: Precision.FP32
    }  # fmt: skip
    assert rate("linear", Precision.FP32) == 1.0 < rate("conv2d", PRECISIONS[0])

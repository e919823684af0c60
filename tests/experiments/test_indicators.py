"""indicators.py on a tiny network: figures are complete, plans save what they must, reports."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync.errors import MismatchError
from qsync.experiments.harness.tables import as_markdown
from qsync.experiments.sensitivity.indicator_report import (
    NEAREST,
    geometric,
    mean,
    picture,
    summary,
    table,
    to_default,
)
from qsync.experiments.sensitivity.indicators import (
    BUDGETS,
    PRECISIONS,
    Scale,
    judge,
    judge_again,
    main,
    plan_at,
    rate,
    spread,
)
from qsync.experiments.workloads.workload import Workload
from qsync.predictor.sensitivity.registry import INDICATORS
from qsync.records.json_files import write_json
from qsync.records.precision import Precision
from qsync.records.profiles import Sensitivity

SCALE = Scale(seeds=2, warm_up=2, steps=2, unseen=3, random_plans=2)


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
    return [judge(tiny(), seed, SCALE, 1) for seed in (0, 1)]


def test_every_indicator_is_judged_by_every_figure(rows):
    for row in rows:
        assert set(row["plan_error"]) == set(INDICATORS)
        assert set(row["spearman"]) == set(INDICATORS) - {"empirical"}
        assert set(row["heldout"]) == {"fp32", *INDICATORS}
        assert all(-1 <= value <= 1 for found in row["spearman"].values() for value in found.values())
        errors = [error for found in row["plan_error"].values() for error in found.values()]
        assert all(len(error["by_batch"]) == 3 == len(row["squared_gradient"]) for error in errors)
        assert all(error["mean"] > 0 and error["standard_error"] > 0 for error in errors)
        assert all(entry["joint"] > 0 and entry["sum"] > 0 for entry in row["joint"])


def test_the_report_has_means_intervals_tables_and_a_picture(rows, tmp_path):
    found = summary(rows)
    cell = found["tiny"]["to_default"]["random"][str(BUDGETS[0])]
    assert cell["mean"] > 0 and cell["factor"] >= 1
    assert found["tiny"]["to_default"]["variance"][str(BUDGETS[0])]["mean"] == pytest.approx(1)
    text, cells = as_markdown(table(found)), found["tiny"]["heldout"]
    # Names of models, Spearman, plans at each saving and the default's own, held-out losses, joint effects.
    others = len(INDICATORS) - 1
    assert text.count("\n| ") == 1 + others + (len(NEAREST) + 1) + (others + 1) + len(INDICATORS) + 1
    assert f"held-out loss, plan by the truth itself | {cells['empirical']['mean']:+.0e} ± " in text
    assert picture(rows, tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")


def test_plans_are_compared_batch_by_batch():
    """A batch on which every error is huge counts as much as any other."""
    by_batch = {"variance": [1.0, 1.0, 1e4], "fisher": [2.0, 4.0, 1e4]}
    row = {"plan_error": {name: {"0.3": spread(errors)} for name, errors in by_batch.items()}}
    assert to_default(row, "fisher", "0.3") == pytest.approx(2.0)
    assert spread([1.0, 3.0]) == {"mean": 2.0, "standard_error": 1.0, "by_batch": [1.0, 3.0]}


def test_plans_are_measured_anew_from_the_sensitivities_of_an_earlier_run(rows):
    again = judge_again(tiny(), replace(SCALE, unseen=4), rows[1])
    for name, found in rows[1]["plan_error"].items():
        for saving, before in found.items():
            now = again["plan_error"][name][saving]["by_batch"]
            before_of_norm, now_of_norm = (
                [error * fmean(row["squared_gradient"]) for error in errors]
                for row, errors in ((rows[1], before["by_batch"]), (again, now))
            )
            assert now_of_norm[:3] == pytest.approx(before_of_norm) and len(now) == 4
    assert {key for key in again if again[key] != rows[1][key]} == {"squared_gradient", "plan_error"}


def test_sensitivities_of_other_weights_are_not_taken(rows):
    with pytest.raises(
        MismatchError, match="tiny, seed 1, are of other weights: .* by leaving out --sensitivities"
    ):
        judge_again(tiny(), replace(SCALE, warm_up=3), rows[1])


def test_a_model_that_the_earlier_run_lacks_is_named(tmp_path):
    write_json(tmp_path / "earlier" / "figures.json", {"rows": [], "commit": "abc"})
    with pytest.raises(MismatchError, match="no sensitivities of vgg, seed 0; choose among its"):
        main(tmp_path / "out", ["vgg"], sensitivities=tmp_path / "earlier")


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

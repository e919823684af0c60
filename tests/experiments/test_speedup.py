"""The ways to use a weak card as plans, and what the report says of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from graphs import cluster_of, mlp, profile_of, sensitivity_of

from qsync.api import capture
from qsync.errors import QSyncError
from qsync.experiments.harness.planned_steps import PlannedSteps
from qsync.experiments.speedup import __main__ as command
from qsync.experiments.speedup import report
from qsync.experiments.speedup.ways import (
    ALL_16,
    ALL_INT8,
    ALONE,
    DDP,
    LB_BSP,
    QSYNC,
    QSYNC_FASTEST,
    QSYNC_SHARE,
    TITLES,
    WEAK_16,
    WEAK_INT8,
    every_share,
    first_alike,
    rate,
    samples_of,
    ways,
)  # fmt: skip
from qsync.records.plan_folder import Basis
from qsync.records.plans import ClassPlan, Plan
from qsync.records.precision import Precision
from qsync.replayer import Recapture, replay

ROWS = 16


def basis_of(slow: float = 2.0, counts: dict[str, int] | None = None) -> Basis:
    graph = mlp(4, width=64, rows=ROWS)
    profiles = {name: profile_of(graph, name, slow=of) for name, of in (("train", 1.0), ("infer", slow))}
    return Basis(graph, cluster_of(counts), profiles, sensitivity_of(graph))


OTHER = Recapture(mlp(4, width=64, rows=ROWS // 2), {})


@pytest.fixture(scope="module")
def plans():
    return ways(basis_of(), OTHER)


def test_every_way_is_a_plan_of_what_its_name_says(plans):
    assert list(plans) == list(TITLES)
    lowered = {
        way: {name: len(own.lowered) for name, own in plan.classes.items()} for way, plan in plans.items()
    }
    every = lowered[WEAK_INT8]["infer"]
    assert lowered[ALONE] == {"train": 0}
    assert lowered[DDP] == lowered[LB_BSP] == {"train": 0, "infer": 0}
    assert lowered[WEAK_16] == lowered[WEAK_INT8] == {"train": 0, "infer": every} and every == 4
    assert lowered[ALL_16] == lowered[ALL_INT8] == {"train": every, "infer": every}


def test_int8_is_in_all_products_where_those_were_profiled():
    precisions = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)
    basis = basis_of()
    profiles = {
        name: profile_of(basis.graph, name, precisions, slow=of)
        for name, of in (("train", 1.0), ("infer", 2.0))
    }
    for able, lowest in ((precisions, Precision.INT8_ALL), (precisions[:3], Precision.INT8)):
        offered = replace(basis, profiles=profiles, cluster=cluster_of(precisions=able))
        found = ways(offered, OTHER)
        assert set(found[WEAK_INT8]["infer"].assignment.values()) == {lowest}
        assert set(found[ALL_INT8]["train"].assignment.values()) == {lowest}


def test_lb_bsp_takes_the_shares_of_least_step(plans):
    basis, nothing = basis_of(), {"train": {}, "infer": {}}
    shares = list(every_share(basis, OTHER))
    steps = [replay(basis.graph, nothing, profiles, basis.cluster).step_s for profiles in shares]
    assert len(shares) == 25 and plans[LB_BSP].step_s == pytest.approx(min(steps))
    assert samples_of(plans[LB_BSP], ROWS)["infer"] < ROWS
    assert sum(samples_of(plans[LB_BSP], ROWS).values()) == 2 * ROWS


@pytest.mark.parametrize(("rows", "least"), [(16, 25), (64, 25)])
def test_shares_are_tried_evenly_and_the_equal_one_among_them(monkeypatch, rows, least):
    graph, other = (mlp(2, width=64, rows=of) for of in (rows, rows // 2))
    profiles = {name: profile_of(graph, name, slow=of) for name, of in (("train", 1.0), ("infer", 2.0))}
    monkeypatch.setattr(
        "qsync.experiments.speedup.ways.profiles_under_levers",
        lambda graph, profiles, cluster, levers, other: levers["infer"].samples,
    )
    sizes = list(
        every_share(Basis(graph, cluster_of(), profiles, sensitivity_of(graph)), Recapture(other, {}))
    )
    assert sizes[0] == rows and len(set(sizes)) == len(sizes) and least <= len(sizes) <= 32
    gaps = {b - a for a, b in itertools.pairwise(sizes[1:]) if b > a}
    assert max(gaps) <= 2 * min(gaps)


def test_with_shares_a_plan_is_no_slower_than_without_or_than_shares_alone_and_adds_no_more(plans):
    assert plans[QSYNC_SHARE].step_s <= min(plans[QSYNC].step_s, plans[LB_BSP].step_s) * (1 + 1e-5)
    assert plans[QSYNC_SHARE].added_variance <= plans[QSYNC].added_variance
    assert plans[QSYNC_FASTEST].step_s <= plans[QSYNC_SHARE].step_s
    assert plans[LB_BSP].added_variance == 0.0


def test_rates_count_the_samples_of_all_ranks():
    basis = basis_of(counts={"train": 2, "infer": 2})
    found = ways(basis, OTHER)
    rates = {way: rate(plan, basis.cluster, ROWS) for way, plan in found.items()}
    assert rates[ALONE] * found[ALONE].step_s == pytest.approx(2 * ROWS)
    assert rates[DDP] * found[DDP].step_s == pytest.approx(4 * ROWS)
    assert rate(found[DDP], basis.cluster, ROWS, step_s=2.0) == pytest.approx(2 * ROWS)
    samples = samples_of(found[LB_BSP], ROWS)
    assert 2 * samples["train"] + 2 * samples["infer"] == 4 * ROWS


def test_the_fast_rank_alone_steps_without_ddp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    batch = (torch.randn(ROWS, 8), torch.zeros(ROWS, 1))
    graph = capture(model, batch[:1])
    assignment = dict.fromkeys(("0", "2"), Precision.BF16)
    plan = Plan("Sequential", graph.hash, {"train": ClassPlan(assignment)})
    before = [parameter.clone() for parameter in model.parameters()]
    steps = PlannedSteps(
        model, plan, "train", batch,
        lambda net, part: torch.nn.functional.mse_loss(net(part[0]), part[1]),
        lambda parameters: torch.optim.SGD(parameters, 0.1), parallel=False,
    )  # fmt: skip
    assert steps.timed() > 0
    found = model.parameters()
    assert all(not torch.equal(old, new) for old, new in zip(before, found, strict=True))


def test_a_class_without_a_precision_takes_the_next_one_up():
    basis = basis_of()
    fast, weak = basis.cluster.classes
    without = replace(fast, precisions=(Precision.FP32, Precision.BF16))
    found = ways(replace(basis, cluster=replace(basis.cluster, classes=(without, weak))), OTHER)
    assert set(found[ALL_INT8]["train"].assignment.values()) == {Precision.BF16}
    assert set(found[ALL_INT8]["infer"].assignment.values()) == {Precision.INT8}


def test_sixteen_bits_are_fp16_where_there_is_no_bf16():
    basis = basis_of()
    fast, weak = basis.cluster.classes
    precisions = (Precision.FP32, Precision.FP16, Precision.INT8)
    cluster = replace(basis.cluster, classes=(fast, replace(weak, precisions=precisions)))
    profiles = {**basis.profiles, "infer": profile_of(basis.graph, "infer", precisions, slow=2.0)}
    found = ways(replace(basis, cluster=cluster, profiles=profiles), OTHER)
    assert set(found[WEAK_16]["infer"].assignment.values()) == {Precision.FP16}
    assert set(found[ALL_16]["train"].assignment.values()) == {Precision.BF16}


def test_cards_with_fp32_alone_have_every_way_in_fp32():
    basis = basis_of()
    classes = tuple(replace(c, precisions=(Precision.FP32,)) for c in basis.cluster.classes)
    found = ways(replace(basis, cluster=replace(basis.cluster, classes=classes)), OTHER)
    assert {p for plan in found.values() for c in plan.classes for p in plan[c].assignment.values()} == {
        Precision.FP32
    }
    assert found[QSYNC_SHARE].step_s == pytest.approx(found[LB_BSP].step_s)
    assert {way: first_alike(way, found) for way in found} == {
        ALONE: ALONE, **dict.fromkeys((DDP, WEAK_16, WEAK_INT8, ALL_16, ALL_INT8, QSYNC), DDP),
        **dict.fromkeys((LB_BSP, QSYNC_SHARE, QSYNC_FASTEST), LB_BSP),
    }  # fmt: skip


def test_ways_that_run_unlike_are_measured_apart(plans):
    unlike = {way: plan for way, plan in plans.items() if way in (DDP, WEAK_16, WEAK_INT8, LB_BSP)}
    assert all(first_alike(way, unlike) == way for way in unlike)


def problem(**rates: float) -> dict:
    variances = {WEAK_16: 1e-3, WEAK_INT8: 1e-2, ALL_INT8: 2e-2, QSYNC: 5e-3}
    found = {
        way: {"samples_per_s": 10.0 * rates.get(way, 1.9), "added_variance": variances.get(way, 0.0),
              "predicted_s": 1.1, "step_s": 1.0}
        for way in TITLES
    }  # fmt: skip
    found[ALONE]["samples_per_s"] = 10.0
    return {"model": "gpt", "share": 0.5, "ranks": 2, "ways": found}


def test_the_report_names_what_is_faster_at_no_more_variance():
    bars = report.bars([problem()])
    assert [one["holds"] for one in bars] == [True, True]
    # INT8 adds more than the plan, so that it may be faster; 16 bits add less, and may not.
    assert report.bars([problem(weak_int8=2.5)])[0]["holds"]
    (faster, _) = report.bars([problem(weak_16=2.0)])
    assert not faster["holds"] and faster["which"] == ["gpt, 0.5: weak cards all in 16 bits"]
    (_, by_shares) = report.bars([problem(lb_bsp=2.0)])
    assert not by_shares["holds"] and by_shares["which"] == ["gpt, 0.5"]
    *_, error = report.bars([{**problem(), "measured": True}])
    assert error["measured"] == pytest.approx(0.1) and not error["holds"]


def test_the_page_says_what_int8_was():
    found = problem()
    for lowest, said in (("int8", False), ("int8_all", True)):
        found["ways"][ALL_INT8]["precisions"] = {"train": ["fp32", lowest], "infer": [lowest]}
        assert ("INT8 is `int8_all`" in report.note(report.bars([found]), [found])) is said
        assert "INT8 is" not in report.note([], [{**found, "pair": "A100 + T4"}])


def test_the_picture_has_every_panel(tmp_path):
    pair = {**problem(), "pair": "A100 + T4"}
    del pair["share"]
    problems = [problem(), {**problem(lb_bsp=1.5), "measured": True}, pair]
    report.draw(problems, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").stat().st_size > 10_000


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(QSyncError, match="no model 'lenet'"):
        command.main(out=tmp_path, model=["lenet"])

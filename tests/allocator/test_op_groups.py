"""Operators that run alike, and the fastest step within a variance."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

from qsync.allocator import allocate, check_plan, explain, fastest_within, matched_groups, shadow_prices
from qsync.allocator.planner import as_plan
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers.precision_recovery import holds
from qsync.errors import FormatError, InfeasibleError, MismatchError, UnsupportedError
from qsync.operators.precision import Precision
from qsync.records.plans import Plan

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8
GRAPH, CLUSTER = encoder(2), cluster_of()
QKV = ("*.query", "*.key", "*.value")


def parts(graph, seed=0):
    draw, found = Random(seed), sensitivity_of(graph)
    omega = {
        op: {p: v * 10 ** draw.uniform(-1, 1) for p, v in modes.items()} for op, modes in found.omega.items()
    }
    profiles = {
        name: profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=1e-11)
        for name, slow in (("train", 1.0), ("infer", 1.8))
    }
    return profiles, replace(found, omega=omega)


def test_names_go_together_in_which_the_wildcards_stand_for_the_same():
    assert matched_groups(GRAPH, [QKV]) == tuple(
        tuple(f"layer.{n}.{one}" for one in ("query", "key", "value")) for n in (0, 1)
    )
    assert matched_groups(GRAPH, [["layer.0.*"]])[0][-1] == "layer.0.fc2"
    assert matched_groups(GRAPH, [["layer.?.query", "layer.[0-9].key"]]) == tuple(
        (f"layer.{n}.query", f"layer.{n}.key") for n in (0, 1)
    )
    # Groups that share an operator are one.
    assert matched_groups(GRAPH, [["*.query", "*.key"], ["*.value", "*.key"]]) == matched_groups(GRAPH, [QKV])
    assert matched_groups(GRAPH, []) == ()


def test_what_is_to_run_alike_does_and_more_variance_is_its_price():
    (profiles, sensitivity), free = parts(GRAPH, 1), None
    target_s = allocate(GRAPH, profiles, sensitivity, CLUSTER, slack=0.1).step_s
    free, bound = (
        allocate(GRAPH, profiles, sensitivity, CLUSTER, target_s=target_s, together=together)
        for together in ([], [QKV])
    )
    for n in (0, 1):
        assert len({bound["infer"].assignment[f"layer.{n}.{one}"] for one in ("query", "key", "value")}) == 1
    assert bound.added_variance >= free.added_variance * (1 - 1e-9)
    assert len({free["infer"].assignment[f"layer.0.{one}"] for one in ("query", "key", "value")}) > 1
    certificate = check_plan(GRAPH, bound, profiles, sensitivity, CLUSTER)
    assert certificate.ok, certificate.violations
    assert Plan.from_json(bound.to_json()) == bound and bound.together == (QKV,)


def test_the_exact_solver_finds_the_best_of_all_that_run_alike():
    graph = mlp(4)
    profiles, sensitivity = parts(graph, 3)
    together = [["fc0", "fc2"]]
    for slack in (0.05, 0.2, 0.5):
        plan = allocate(graph, profiles, sensitivity, CLUSTER, slack=slack, together=together)
        state = State(make_problem(graph, profiles, sensitivity, CLUSTER))
        found = []
        for first, second, last in itertools.product((FP32, BF16, INT8), repeat=3):
            state.restore({"infer": {"fc0": first, "fc1": second, "fc2": first, "fc3": last}})
            found += [state.variance] if holds(state, plan.target_s) else []
        assert plan.added_variance == pytest.approx(min(found), rel=1e-3)


def test_a_plan_that_does_not_keep_its_word_is_found_out():
    profiles, sensitivity = parts(GRAPH)
    assignment = {op.name: FP32 for op in GRAPH.adjustable} | {"layer.1.key": BF16}
    plan = as_plan(GRAPH, {"train": {}, "infer": assignment}, profiles, CLUSTER, sensitivity=sensitivity)
    found = check_plan(GRAPH, replace(plan, together=(QKV,)), profiles, sensitivity, CLUSTER)
    assert "layer.1.query and layer.1.key are to run alike" in found.violations[0]


def test_what_cannot_run_alike_is_refused():
    profiles, sensitivity = parts(GRAPH)

    def refused(error, match, **options):
        with pytest.raises(error, match=match):
            allocate(GRAPH, profiles, sensitivity, CLUSTER, **options)

    refused(MismatchError, "nearest: 'layer.[01].query'", together=[["*.query", "*.quary"]])
    refused(FormatError, "no two operators", together=[["layer.0.query", "*.1.key"]])
    refused(
        FormatError, "layer.0.query and layer.0.key are to run alike, but are pinned to bf16 and int8",
        together=[QKV], pins={"layer.0.query": "bf16", "layer.0.key": "int8"},
    )  # fmt: skip
    ops = dict(profiles["infer"].ops)
    ops["layer.0.key"] = {"fp32": ops["layer.0.key"]["fp32"]}
    profiles["infer"] = replace(profiles["infer"], ops=ops)
    plan = allocate(GRAPH, profiles, sensitivity, CLUSTER, together=[QKV])
    assert plan["infer"].assignment["layer.0.query"] is FP32
    refused(UnsupportedError, "run alike on infer", together=[QKV], pins={"layer.0.query": "bf16"})


def test_a_pin_of_one_holds_for_all_that_run_alike():
    profiles, sensitivity = parts(GRAPH)
    plan = allocate(GRAPH, profiles, sensitivity, CLUSTER, together=[QKV], pins={"layer.0.key": "bf16"})
    assert {plan["infer"].assignment[f"layer.0.{one}"] for one in ("query", "key", "value")} == {BF16}


def test_the_fastest_step_within_a_variance():
    profiles, sensitivity = parts(GRAPH)
    fast = allocate(GRAPH, profiles, sensitivity, CLUSTER)
    found = [
        fastest_within(GRAPH, profiles, sensitivity, CLUSTER, part * fast.added_variance)
        for part in (2.0, 0.5, 0.05, 0.0)
    ]
    assert found[0].step_s == pytest.approx(fast.step_s)
    assert all(a.step_s < b.step_s for a, b in itertools.pairwise(found))
    for plan, part in zip(found, (2.0, 0.5, 0.05, 0.0), strict=True):
        assert plan.added_variance <= part * fast.added_variance
    # A little less time would not have been enough.
    less = found[1].step_s - 0.01 * (found[-1].step_s - fast.step_s)
    sooner = allocate(GRAPH, profiles, sensitivity, CLUSTER, target_s=less)
    assert sooner.added_variance > 0.5 * fast.added_variance
    with pytest.raises(InfeasibleError, match="pins and memory add .* too much"):
        fastest_within(GRAPH, profiles, sensitivity, CLUSTER, 0.0, pins={"head": "int8"})
    for variance in (-1.0, float("nan")):
        with pytest.raises(FormatError, match="variance"):
            fastest_within(GRAPH, profiles, sensitivity, CLUSTER, variance)
    with pytest.raises(FormatError, match="leave out slack"):
        fastest_within(GRAPH, profiles, sensitivity, CLUSTER, 1.0, slack=0.1)


def test_what_runs_alike_is_explained_and_priced_together():
    profiles, sensitivity = parts(GRAPH)
    plan = allocate(GRAPH, profiles, sensitivity, CLUSTER, slack=0.1, together=[QKV])
    group = next(
        [f"layer.{n}.{one}" for one in ("query", "key", "value")]
        for n in (0, 1) if f"layer.{n}.query" in plan["infer"].lowered
    )  # fmt: skip
    reasons = {
        r.op: r for r in explain(GRAPH, plan, profiles, sensitivity, CLUSTER) if r.device_class == "infer"
    }
    assert len({(reasons[op].raised_to, reasons[op].variance_regained) for op in group}) == 1
    raised = plan["infer"].assignment | dict.fromkeys(group, reasons[group[0]].raised_to)
    other = as_plan(GRAPH, {"train": {}, "infer": raised}, profiles, CLUSTER)
    assert reasons[group[0]].step_if_raised_s == pytest.approx(other.step_s)
    for price in shadow_prices(GRAPH, plan, profiles, sensitivity, CLUSTER):
        for found in (price.next_raise, price.next_lowering):
            assert found is None or len({*group} & {*found.ops}) in (0, 3)
    # Parted by hand, each is looked at for itself again.
    parted = plan.pin(group[0], "fp32")
    assert all(r.op != group[0] for r in explain(GRAPH, parted, profiles, sensitivity, CLUSTER))

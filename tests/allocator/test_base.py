"""Plans above a base precision: who runs in it, what is below it, and variance above its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync.allocator import allocate, check_plan, explain, shadow_prices, what_ifs
from qsync.commands.tables import base_lines
from qsync.errors import FormatError, UnsupportedError
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.records.base import base_of, base_on, bases_of, is_below, parse_base
from qsync.records.cluster import Link
from qsync.records.graph import Op
from qsync.records.plans import Plan
from qsync.replayer import replay

FP32, TF32 = Precision.FP32, Precision.TF32
BF16, FP16 = Precision.BF16, Precision.FP16
MXFP8, FP8, INT8, INT8_ALL = Precision.MXFP8, Precision.FP8, Precision.INT8, Precision.INT8_ALL
GRAPH = encoder(2)
KINDS = {op.name: op.kind for op in GRAPH.adjustable}
PROFILES = {
    name: profile_of(GRAPH, name, slow=slow, latency_s=1e-8, cast_s=1e-11)
    for name, slow in (("train", 1.0), ("infer", 1.4))
}
SENSITIVITY = sensitivity_of(GRAPH)
CLUSTER = cluster_of(link=Link(0.0, 1e30))
AT_BASE = {op.name: base_of(op, BF16) for op in GRAPH.adjustable}


def planned(**options) -> Plan:
    return allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, base="bf16", **options)


def test_the_strong_class_runs_in_the_base_and_the_weak_one_below_it():
    plan = planned()
    assert plan["train"].assignment == AT_BASE and plan["train"].lowered == ()
    alone = replay(GRAPH, {"train": AT_BASE, "infer": AT_BASE}, PROFILES, CLUSTER)["train"].compute_s
    assert plan.target_s == pytest.approx(alone)
    assert plan.step_s <= plan.target_s * (1 + 1e-9)
    weak = plan["infer"]
    assert 0 < len(weak.lowered) < len(KINDS)
    assert all(weak.assignment[op] in (AT_BASE[op], INT8) for op in KINDS)
    assert set(weak.lowered) == {op for op in KINDS if weak.assignment[op] != AT_BASE[op]}
    assert check_plan(GRAPH, plan, PROFILES, SENSITIVITY, CLUSTER).ok


def test_variance_is_stated_above_the_base_which_is_shown_too():
    plan = planned()
    base = sum(SENSITIVITY[op, p] for op, p in AT_BASE.items()) / 4
    for name in ("train", "infer"):
        assert plan[name].predicted.base_variance == pytest.approx(base)
    own = {
        op: SENSITIVITY[op, p] - SENSITIVITY[op, AT_BASE[op]] for op, p in plan["infer"].assignment.items()
    }
    assert plan["train"].predicted.added_variance == 0.0
    assert plan["infer"].predicted.added_variance == pytest.approx(sum(own.values()) / 4)
    assert plan.bound <= plan.added_variance * (1 + 1e-9)


def test_the_table_s_lines_say_what_variance_is_above():
    (line,) = base_lines(planned())
    assert line == "Variance is stated above that of bf16 on every class, " + (
        f"{2 * planned()['train'].predicted.base_variance:.2e}"
    )
    assert base_lines(allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER)) == []


def test_rounding_less_than_the_base_does_adds_nothing():
    omega = {op: {**modes, "int8": modes["bf16"] / 2} for op, modes in SENSITIVITY.omega.items()}
    plan = allocate(GRAPH, PROFILES, replace(SENSITIVITY, omega=omega), CLUSTER, base="bf16")
    assert plan.added_variance == 0.0 and plan.step_s <= plan.target_s * (1 + 1e-9)


def test_a_class_without_the_base_runs_in_its_best_one():
    classes = tuple(
        replace(c, device="cuda", precisions=(FP32, FP16, INT8)) if c.name == "infer" else c
        for c in CLUSTER.classes
    )
    cluster = replace(CLUSTER, classes=classes)
    profiles = {**PROFILES, "infer": profile_of(GRAPH, "infer", (FP32, FP16, INT8), slow=1.4, cast_s=1e-11)}
    plan = allocate(GRAPH, profiles, SENSITIVITY, cluster, base="bf16", slack=10.0)
    assert plan["infer"].base is FP16 and plan["train"].base is plan.base is BF16
    assert plan["infer"].assignment == {op.name: base_of(op, FP16) for op in GRAPH.adjustable}
    assert plan["infer"].lowered == ()


def test_pins_may_lie_above_the_base():
    first = next(op for op, p in AT_BASE.items() if p is BF16)
    plan = planned(pins={first: "fp32"}, slack=1.0)
    assert plan["train"].assignment[first] is plan["infer"].assignment[first] is FP32
    assert plan.added_variance == 0.0


def test_a_plan_keeps_its_base_in_its_file(tmp_path):
    plan = planned()
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    plain = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER)
    assert "base" not in str(plain.to_json()).replace("base_variance", "") and plain.base is FP32
    assert plain == allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, base="fp32")


def test_reasons_compare_with_the_base():
    plan = planned()
    reasons = explain(GRAPH, plan, PROFILES, SENSITIVITY, CLUSTER)
    assert [reason.op for reason in reasons] == list(plan["infer"].lowered)
    assert {reason.raised_to for reason in reasons} <= {AT_BASE[reason.op] for reason in reasons}


def test_bases_are_named_and_must_be_multiplied_somewhere():
    with pytest.raises(
        FormatError, match="int8 is not a base precision: choose one of fp32, tf32, bf16, fp16"
    ):
        parse_base("int8")
    with pytest.raises(
        UnsupportedError, match="no device here has tf32 in hardware; choose one of fp32, bf16"
    ):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, base="tf32")


def test_which_precisions_are_below_a_base():
    below = {base: [p for p in Precision if is_below(p, base)] for base in (FP32, TF32, BF16, FP16)}
    assert below == {
        FP32: [TF32, BF16, FP16, MXFP8, FP8, INT8, INT8_ALL],
        TF32: [BF16, FP16, MXFP8, FP8, INT8, INT8_ALL],
        BF16: [MXFP8, FP8, INT8, INT8_ALL],
        FP16: [MXFP8, FP8, INT8, INT8_ALL],
    }
    assert base_on(BF16, (FP32, INT8)) is base_on(TF32, (FP32, FP16)) is FP32
    assert base_on(FP16, bases_of("cpu", tuple(Precision))) is BF16
    assert bases_of("cuda", (FP32, FP16, INT8)) == (FP32, FP16)
    of_kind = {op.kind: base_of(op, BF16) for op in GRAPH.adjustable}
    assert of_kind["linear"] is BF16 and of_kind.get("embedding", FP32) is FP32
    assert base_of(Op("x", "embedding", Role.ADJUSTABLE, (), (), "fp32", (4,)), BF16) is FP32


def test_a_plan_that_is_pinned_above_its_base_is_explained():
    precisions = (FP32, BF16, INT8)
    profiles = {
        name: profile_of(GRAPH, name, precisions, slow=slow, latency_s=1e-8, cast_s=1e-11)
        for name, slow in (("train", 1.0), ("infer", 1.4))
    }
    parts = (profiles, SENSITIVITY, cluster_of(precisions=precisions, link=Link(0.0, 1e30)))
    plan = allocate(GRAPH, *parts, base="bf16")
    op = next(op for op in KINDS if plan["infer"].assignment[op] is not FP32)
    pinned = plan.pin(op, "fp32")
    (price,) = [one for one in shadow_prices(GRAPH, pinned, *parts) if one.device_class == "infer"]
    assert price.next_lowering is not None
    changes = {entry.what for entry in what_ifs(GRAPH, pinned, *parts)}
    assert any(op in what for what in changes)
    assert op not in {
        reason.op for reason in explain(GRAPH, pinned, *parts) if reason.device_class == "infer"
    }

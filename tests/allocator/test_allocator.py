"""Allocation: the constraints always hold, nothing is lowered for nothing, every refusal names its reason."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from counting import num_calls
from graphs import (
    CPU_PRECISIONS,
    Builder,
    cluster_of,
    encoder,
    graphs,
    mlp,
    precisions_for,
    profile_of,
    sensitivity_of,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qsync.allocator import allocate, check_plan, explain, uniform
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import fastest_start
from qsync.allocator.solvers.precision_recovery import recover
from qsync.errors import CalibrationError, FormatError, InfeasibleError, MismatchError, UnsupportedError
from qsync.lowering.incremental import lower
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import peak_memory
from qsync.records.cluster import Link
from qsync.records.plans import Plan
from qsync.records.profiles import Cost
from qsync.replayer import replay

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8
GRAPH = encoder(2)
# Casts cheap enough beside these small products that lowering pays.
PROFILES = {name: profile_of(GRAPH, name, slow=slow, latency_s=1e-8, cast_s=1e-11) for name, slow in
            (("train", 1.0), ("infer", 1.8))}  # fmt: skip
SENSITIVITY = sensitivity_of(GRAPH)
CLUSTER = cluster_of()


def variance(plan: Plan) -> float:
    return sum(entry.predicted.added_variance for entry in plan.classes.values())


def fp32_step(names=("train", "infer")):
    cluster = cluster_of(dict.fromkeys(names, 1))
    return replay(GRAPH, {name: {} for name in names}, PROFILES, cluster).step_s


def pair(graph, slow, cast_s=1e-11):
    return {
        name: profile_of(graph, name, slow=s, latency_s=1e-8, cast_s=cast_s)
        for name, s in (("train", 1.0), ("infer", slow))
    }


def test_the_weak_class_is_lowered_just_enough_that_nobody_waits():
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, cluster_of(link=Link(0.0, 1e30)))
    assert not plan["train"].lowered
    assert 0 < len(plan["infer"].lowered) < len(GRAPH.adjustable)
    assert plan.step_s <= plan.target_s * (1 + 1e-9)
    assert plan.step_s == pytest.approx(fp32_step(["train"]))
    assert plan["train"].predicted.wait_s == 0.0
    assert plan["infer"].predicted.wait_s <= 0.03 * plan.step_s  # less than any one raise takes


def test_the_plan_adds_less_variance_than_any_uniform_choice_that_is_fast_enough():
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER)
    fast_enough = []
    for precision in CPU_PRECISIONS:
        other = uniform(GRAPH, PROFILES, CLUSTER, {"infer": precision}, sensitivity=SENSITIVITY)
        if other.step_s <= plan.target_s * (1 + 1e-9):
            fast_enough.append(variance(other))
    assert fast_enough and variance(plan) < min(fast_enough)


def test_equal_devices_run_in_fp32():
    profiles = {name: replace(PROFILES["train"], device_class=name) for name in ("train", "infer")}
    plan = allocate(GRAPH, profiles, SENSITIVITY, CLUSTER)
    assert not plan["train"].lowered and not plan["infer"].lowered
    assert variance(plan) == 0.0


def test_one_class_alone_stays_in_fp32_unless_all_may_be_lowered():
    cluster, profiles = cluster_of({"train": 2}), {"train": PROFILES["train"]}
    assert not allocate(GRAPH, profiles, SENSITIVITY, cluster)["train"].lowered
    assert allocate(GRAPH, profiles, SENSITIVITY, cluster, lower_all=True)["train"].lowered


def test_slack_buys_precision_and_a_long_target_buys_all_of_it():
    tight, loose = (allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, slack=slack) for slack in (0.0, 0.2))
    assert loose.target_s == pytest.approx(1.2 * tight.target_s)
    assert variance(loose) < variance(tight)
    assert variance(allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=10.0)) == 0.0


def test_steps_that_a_profile_cannot_tell_apart_are_equally_fast():
    """As far as the strongest class waits anyway."""
    least = allocate(GRAPH, far := pair(GRAPH, 8.0), SENSITIVITY, CLUSTER)
    assert least.target_s == pytest.approx(least.step_s)
    far = {**far, "infer": replace(far["infer"], error=0.02)}
    plan = allocate(GRAPH, far, SENSITIVITY, CLUSTER)
    assert plan.target_s == pytest.approx(1.02 * least.target_s)
    assert variance(plan) < variance(least)
    assert allocate(GRAPH, far, SENSITIVITY, CLUSTER, slack=0.0).target_s == pytest.approx(least.target_s)
    near = {**PROFILES, "infer": replace(PROFILES["infer"], error=0.02)}
    expected = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER).target_s
    assert allocate(GRAPH, near, SENSITIVITY, CLUSTER).target_s == pytest.approx(expected)


def test_sensitive_operators_keep_their_precision():
    weights = {op.name: 1e6 if op.name.startswith("layer.0") else 1.0 for op in GRAPH.adjustable}
    lowered = allocate(GRAPH, PROFILES, sensitivity_of(GRAPH, weights), CLUSTER, slack=0.4)["infer"].lowered
    assert lowered and not [op for op in lowered if op.startswith("layer.0")]


def test_variance_counts_the_ranks_of_a_class():
    cluster = cluster_of({"train": 1, "infer": 3})
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, cluster)
    expected = 3 / 16 * sum(SENSITIVITY[op, p] for op, p in plan["infer"].assignment.items())
    assert plan["infer"].predicted.added_variance == pytest.approx(expected)


def test_pins_hold_and_the_rest_is_still_chosen():
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"layer.0.*": "fp32"}, slack=0.3)
    assert {plan["infer"].assignment[op] for op in plan["infer"].assignment if op.startswith("layer.0.")} == {
        FP32
    }
    assert plan["infer"].lowered
    pinned = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"head": INT8})
    assert pinned["infer"].assignment["head"] == pinned["train"].assignment["head"] == INT8


def test_only_precisions_that_class_and_profile_have_are_chosen():
    only_bf16 = cluster_of(precisions=(FP32, BF16))
    assert set(allocate(GRAPH, PROFILES, SENSITIVITY, only_bf16)["infer"].assignment.values()) <= {FP32, BF16}
    measured = {
        **PROFILES,
        "infer": profile_of(GRAPH, "infer", (FP32, INT8), slow=1.8, latency_s=1e-8, cast_s=1e-11),
    }
    assert set(allocate(GRAPH, measured, SENSITIVITY, CLUSTER)["infer"].assignment.values()) == {FP32, INT8}


def test_the_same_input_gives_the_same_plan():
    assert allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER) == allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER)


def test_a_precision_that_does_not_pay_is_not_used():
    dear = {**PROFILES, "infer": profile_of(GRAPH, "infer", slow=1.8, cast_s=1e-3)}
    assert not allocate(GRAPH, dear, SENSITIVITY, CLUSTER)["infer"].lowered


def test_operators_that_share_a_cast_are_lowered_together():
    # Quantizing costs more than one product gains by it and less than three gain; others lose by INT8.
    graph = encoder(1)
    base = profile_of(graph, "infer", (FP32, INT8), latency_s=0.0, cast_s=0.0)
    one = base.ops["layer.0.query"]
    quantize = Cost(2 * (one["fp32"].total_s - one["int8"].total_s))
    losing = {
        op.name: {"fp32": base.ops[op.name]["fp32"], "int8": Cost(1.0), "int8 gelu": Cost(1.0)}
        for op in graph.adjustable
        if op.name.rpartition(".")[2] not in ("query", "key", "value")
    }
    infer = replace(base, casts={("embedding", "fp32", "int8_row"): quantize}, ops={**base.ops, **losing})
    nothing = {op: dict.fromkeys(modes, Cost(0.0)) for op, modes in base.ops.items()}
    profiles = {"train": replace(base, device_class="train", host_s=0.0, ops=nothing), "infer": infer}
    plan = allocate(graph, profiles, sensitivity_of(graph), cluster_of())
    assert set(plan["infer"].lowered) == {"layer.0.query", "layer.0.key", "layer.0.value"}


def test_a_class_that_need_not_be_lowered_is_raised_as_a_whole():
    # Between neighbours in BF16 an FP32 operator costs two casts, so no single raise pays; all together do.
    graph = mlp(4, width=64, rows=64)
    fast = profile_of(graph, "train", (FP32,))
    chain = {
        op.name: {**fast.ops[op.name], "bf16": Cost(0.99 * fast.ops[op.name]["fp32"].total_s)}
        for op in graph.ops
    }
    middle = replace(fast, device_class="middle", ops=chain, optimizer_s=1.01 * fast.optimizer_s)
    middle = replace(middle, cast_fit={key: (Cost(1e-4), Cost(0.0)) for key in fast.cast_fit})
    free = {(value.name, "fp32", "bf16"): Cost(0.0) for value in graph.inputs}
    middle = replace(middle, casts={**free, ("act3", "bf16", "fp32"): Cost(0.0)})
    profiles = {
        "train": fast,
        "middle": middle,
        "infer": profile_of(graph, "infer", slow=1.8, latency_s=1e-8, cast_s=0.0),
    }
    plan = allocate(
        graph, profiles, sensitivity_of(graph), cluster_of(dict.fromkeys(profiles, 1)), slack=0.03
    )
    assert plan["infer"].lowered and not plan["middle"].lowered


def test_a_constant_out_of_a_type_s_range_forbids_that_type():
    builder = Builder()
    x = builder.enter("x", (4, 8))
    builder.op(
        "product", "linear", Role.ADJUSTABLE, [x, builder.enter("w", (8, 8), "parameter")], magnitude=1e9
    )
    graph, precisions = builder.build(), tuple(Precision)
    cluster, profiles = (
        cluster_of({"infer": 1}, precisions),
        {"infer": profile_of(graph, precisions=precisions)},
    )
    choices = (
        make_problem(graph, profiles, sensitivity_of(graph), cluster).classes["infer"].choices["product"]
    )
    assert Precision.FP16 not in choices and BF16 in choices


# What must hold whatever the graph, the speeds and the link are.

slows = st.sampled_from([1.0, 1.3, 2.0, 4.0])
some_links = st.sampled_from([Link(0.0, 1e30), Link(1e-6, 1e9), Link(1e-5, 1e8, 0.5)])


@settings(max_examples=40)
@given(graphs(max_ops=8), slows, some_links, st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 1e-11]))
def test_every_plan_passes_its_check(graph, slow, link, slack, cast_s):
    assume(graph.adjustable)
    profiles, cluster, sensitivity = pair(graph, slow, cast_s), cluster_of(link=link), sensitivity_of(graph)
    plan = allocate(graph, profiles, sensitivity, cluster, slack=slack)
    certificate = check_plan(graph, plan, profiles, sensitivity, cluster)
    assert certificate.ok, certificate.violations
    assert certificate.step_s <= plan.target_s * (1 + 1e-9)


@settings(max_examples=25)
@given(graphs(max_ops=6), slows, some_links)
def test_no_assignment_at_all_is_better(graph, slow, link):
    assume(0 < len(graph.adjustable) <= 4)
    profiles, cluster, sensitivity = pair(graph, slow), cluster_of(link=link), sensitivity_of(graph)
    plan = allocate(graph, profiles, sensitivity, cluster)
    problem = make_problem(graph, profiles, sensitivity, cluster)
    part = problem.classes["infer"]
    best = float("inf")
    for choice in itertools.product(*part.choices.values()):
        assignment = dict(zip(part.choices, choice, strict=True))
        step = replay(graph, {"train": {}, "infer": assignment}, profiles, cluster).step_s
        if step <= plan.target_s * (1 + 1e-9):
            best = min(best, sum(part.variance[op][p] for op, p in assignment.items()))
    assert best == pytest.approx(variance(plan), rel=1e-3, abs=1e-30)


@settings(max_examples=40)
@given(graphs(max_ops=8), st.data())
def test_moves_are_undone_exactly_and_memory_is_that_of_the_lowered_graph(graph, data):
    assume(graph.adjustable)
    precisions = tuple(Precision)
    profiles = {"infer": profile_of(graph, precisions=precisions)}
    cluster = cluster_of({"infer": 2}, precisions=precisions)
    state = State(make_problem(graph, profiles, sensitivity_of(graph), cluster))
    one = state.classes["infer"]
    assert one.fits()
    for name, precision in data.draw(st.lists(precisions_for(graph), max_size=5)):
        before = (state.assignments(), state.step_s(), state.variance, one.peak_bytes, one.memory())
        move = state.move("infer", {name: precision})
        fresh_memory = peak_memory(one.lowering.lowered(), num_ranks=2)
        assert one.peak_bytes == fresh_memory.peak_bytes and one.memory() == fresh_memory
        fresh = replay(graph, state.assignments(), profiles, cluster)
        assert state.step_s() == pytest.approx(fresh.step_s, rel=1e-12)
        state.back(move)
        assert (state.assignments(), state.step_s(), state.variance, one.peak_bytes, one.memory()) == before
        state.move("infer", {name: precision})


@settings(max_examples=40)
@given(
    graph=graphs(max_ops=10), cast_s=st.sampled_from([1e-11, 3e-9]), room=st.sampled_from([1.05, 1.2, 1.5])
)
def test_recovery_keeps_the_target_and_leaves_nothing_undone_that_would_hold(graph, cast_s, room):
    assume(graph.adjustable)
    state = State(
        make_problem(graph, pair(graph, 2.0, cast_s), sensitivity_of(graph), cluster_of(link=Link(0.0, 1e30)))
    )
    one = state.classes["infer"]
    state.move("infer", {op: options[0] for op, options in one.part.choices.items()})
    target, before = state.step_s() * room, state.variance
    recover(state, ["infer"], target)
    assert state.step_s() <= target * (1 + 1e-9)
    assert state.variance <= before
    for op, options in one.part.choices.items():
        for precision in options[options.index(one.precision(op)) + 1 :]:
            move = state.move("infer", {op: precision})
            assert state.step_s() > target
            state.back(move)


def test_a_raise_that_was_refused_is_tried_again_once_its_neighbour_is_raised():
    # fc0 in FP32 before fc1 in BF16 needs a dear cast; fc1 regains less, so it comes later; fc2 cannot move.
    graph = mlp(3)
    base = profile_of(graph, "infer", (FP32, BF16), latency_s=0.0, cast_s=0.0)
    same = {name: dict.fromkeys(("fp32", "bf16"), Cost(1e-4)) for name in ("fc0", "fc1")}
    ops = {**base.ops, **same, "fc2": {"fp32": Cost(1.0), "bf16": Cost(1e-4)}}
    profile = replace(base, ops=ops, casts={("act0", "fp32", "bf16"): Cost(1e-3)})
    sensitivity = sensitivity_of(graph, {"fc0": 10.0, "fc1": 1.0, "fc2": 5.0})
    state = State(make_problem(graph, {"infer": profile}, sensitivity, cluster_of({"infer": 1})))
    state.move("infer", dict.fromkeys(("fc0", "fc1", "fc2"), BF16))
    recover(state, ["infer"], state.step_s() * 1.1)
    assert state.assignments()["infer"] == {"fc0": FP32, "fc1": FP32, "fc2": BF16}


# Memory.


def needed(assignment) -> int:
    return peak_memory(lower(GRAPH, assignment), num_ranks=2).peak_bytes


def test_a_class_whose_memory_is_short_is_lowered_until_it_fits():
    big = encoder(2, rows=2048)
    profiles, sensitivity = pair(big, 1.0), sensitivity_of(big)
    full = peak_memory(lower(big, {}), num_ranks=2).peak_bytes
    budget = int(0.9 * full)
    for name in ("train", "infer"):
        plan = allocate(big, profiles, sensitivity, CLUSTER, budgets={name: budget})
        assert plan[name].lowered
        assert plan[name].predicted.memory_bytes <= budget
        assert check_plan(big, plan, profiles, sensitivity, CLUSTER).ok


@settings(max_examples=25)
@given(graphs(max_ops=8), slows, st.floats(0.5, 1.0), st.floats(0.0, 0.5))
def test_budgets_hold_wherever_a_plan_exists(graph, slow, share, more):
    assume(graph.adjustable)
    profiles, sensitivity, cluster = pair(graph, slow), sensitivity_of(graph), cluster_of()
    budget = int(share * peak_memory(lower(graph, {}), num_ranks=2).peak_bytes)
    try:
        plan = allocate(graph, profiles, sensitivity, cluster, budgets={"infer": budget})
    except InfeasibleError:
        return
    certificate = check_plan(graph, plan, profiles, sensitivity, cluster)
    assert certificate.ok, certificate.violations
    # More memory never hurts: what was feasible still is, for the same target.
    roomy = {"infer": int(budget * (1 + more))}
    again = allocate(graph, profiles, sensitivity, cluster, budgets=roomy, target_s=plan.target_s)
    assert variance(again) <= variance(plan) * (1 + 1e-9)


def test_a_budget_nothing_meets_says_who_by_how_much_and_what_holds_most():
    with pytest.raises(InfeasibleError) as error:
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, budgets={"infer": 100_000})
    message = str(error.value)
    assert message.startswith("infer: no assignment fits in its memory of 100000 bytes")
    assert "bytes more, and " in message and "holds most" in message
    products = [op.name for op in GRAPH.adjustable if op.kind == "linear"]
    least = min(needed(dict.fromkeys(products, precision)) for precision in CPU_PRECISIONS)
    missing = int(message.partition("needs ")[2].partition(" ")[0])
    assert 0 < missing <= least - 100_000
    with pytest.raises(InfeasibleError, match=f"needs {missing - 1} bytes more"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, budgets={"infer": 100_001})


def test_a_class_far_too_large_for_its_memory_is_not_searched(monkeypatch):
    monkeypatch.setattr(fastest_start, "_save_memory", lambda *_: pytest.fail("nothing can fit"))
    with pytest.raises(InfeasibleError, match="infer: no assignment fits"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, budgets={"infer": 1000})


def test_a_target_is_met_by_an_earlier_exchange_though_the_class_computes_longer():
    """In BF16 the first product is faster forward and slower backward, which the exchange hides."""
    graph, cluster = mlp(), cluster_of(link=Link(0.0, 1e7))
    first, fp32 = graph.adjustable[0].name, Cost(4e-5, 4e-5)
    profiles = {
        name: replace(profile, ops={
            **profile.ops, first: {"fp32": fp32, "bf16": Cost(2e-5, 7e-5)},
        })
        for name, profile in pair(graph, 2.0).items()
    }  # fmt: skip
    arguments = (graph, profiles, sensitivity_of(graph), cluster)
    least_s = allocate(*arguments, pins={first: "bf16"}, bucket_cap_bytes=512).step_s
    assert allocate(*arguments, bucket_cap_bytes=512).step_s > least_s * 1.001
    plan = allocate(*arguments, target_s=least_s, bucket_cap_bytes=512)
    assert plan.step_s <= least_s * (1 + 1e-9) and plan["infer"].assignment[first] == "bf16"


def test_a_target_nobody_reaches_says_by_how_much():
    with pytest.raises(
        InfeasibleError, match=r"no plan reaches a step of 1e-06 s: the fastest one takes .* train is the"
    ):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=1e-6)


# Bad input.


def test_what_is_wrong_with_a_request_is_named():
    with pytest.raises(MismatchError, match=r"matches 'layer.9.query' .nearest: 'layer.1.query'.; give"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"layer.9.query": "fp32"})
    with pytest.raises(FormatError, match="unknown precision 'int4'"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"head": "int4"})
    with pytest.raises(FormatError, match=r"gives layer\.0\.attention .attention. int8_all, which has no"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"layer.0.*": "int8_all"})
    with pytest.raises(UnsupportedError, match="head is pinned to fp16, which train lacks"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"head": "fp16"})
    with pytest.raises(
        MismatchError, match=r"layer\.0\.gelu .gelu. is a following one, whose precision is not"
    ):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"layer.0.gelu": "fp32"})
    with pytest.raises(FormatError, match="the cluster has no device class 'other'"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, budgets={"other": 1})
    for budget in (0, -1, float("nan")):
        with pytest.raises(
            FormatError, match=f"memory budget of infer must be positive, found {budget}; give"
        ):
            allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, budgets={"infer": budget})
    with pytest.raises(FormatError, match="bucket_cap_bytes must be at least 1, found 0"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, bucket_cap_bytes=0)
    with pytest.raises(FormatError, match="target must be positive and finite, found nan"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=float("nan"))
    with pytest.raises(FormatError, match="slack must not be negative"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, slack=-0.1)
    with pytest.raises(FormatError, match="target_s says what slack adds to the least step; leave one of"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=0.1, slack=0.0)
    with pytest.raises(MismatchError, match="no profile of device class 'infer'"):
        allocate(GRAPH, {"train": PROFILES["train"]}, SENSITIVITY, CLUSTER)
    with pytest.raises(MismatchError, match="sensitivity was gathered on graph"):
        allocate(GRAPH, PROFILES, sensitivity_of(mlp()), CLUSTER)
    poisoned = {**SENSITIVITY.omega, "head": {"bf16": float("nan"), "int8": 1.0}}
    with pytest.raises(CalibrationError, match="sensitivity of head at bf16 is nan"):
        allocate(GRAPH, PROFILES, replace(SENSITIVITY, omega=poisoned), CLUSTER)
    unmeasured = {**PROFILES, "infer": replace(PROFILES["infer"], ops={})}
    with pytest.raises(MismatchError, match=r"no time of layer\.0\.query in fp32 .it has nothing."):
        allocate(GRAPH, unmeasured, SENSITIVITY, CLUSTER)


def test_pins_that_overlap_must_agree():
    """An operator is pinned once: neither the later pattern nor the narrower one wins in silence."""
    words = r"layer\.0\.key is given bf16 by 'layer\.0\.key' and fp32 by 'layer\.0\.\*'; leave one of"
    with pytest.raises(FormatError, match=words):
        allocate(
            GRAPH,
            PROFILES,
            SENSITIVITY,
            CLUSTER,
            pins={"layer.0.key": "bf16", "head": "int8", "layer.0.*": FP32},
        )
    pins = {"layer.0.*": "bf16", "*.key": BF16}
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins=pins)
    assert {
        plan["infer"].assignment[f"layer.{i}.{op}"] for i, op in ((0, "key"), (0, "fc1"), (1, "key"))
    } == {BF16}


def test_uniform_plans_move_up_what_the_profile_says_is_slower():
    strict = uniform(GRAPH, PROFILES, CLUSTER, {"infer": "int8"}, strict=True)
    assert uniform(GRAPH, PROFILES, CLUSTER, {"infer": "int8"})["infer"] == strict["infer"]
    ops = dict(PROFILES["infer"].ops)
    for op in ("layer.0.query", "layer.0.key", "layer.0.value", "layer.1.fc1"):
        slow = {m: Cost(c.forward_s * 9, c.backward_s) if "int8" in m else c for m, c in ops[op].items()}
        ops[op] = slow
    profiles = {**PROFILES, "infer": replace(PROFILES["infer"], ops=ops)}
    plan = uniform(GRAPH, profiles, CLUSTER, {"infer": "int8"})
    moved = {op for op, p in plan["infer"].assignment.items() if p != strict["infer"].assignment[op]}
    assert moved == {"layer.0.query", "layer.0.key", "layer.0.value", "layer.1.fc1"}


def test_uniform_plans_take_what_exists():
    precisions = (FP32, Precision.INT8_ALL)
    profiles = {name: profile_of(GRAPH, name, precisions) for name in PROFILES}
    cluster, sensitivity = cluster_of(precisions=precisions), sensitivity_of(GRAPH)
    plan = uniform(GRAPH, profiles, cluster, {"infer": "int8_all"}, sensitivity=sensitivity)
    assert not plan["train"].lowered
    assert {op for op, p in plan["infer"].assignment.items() if p == FP32} == {
        "layer.0.attention",
        "layer.1.attention",
    }
    assert check_plan(GRAPH, plan, profiles, sensitivity, cluster).ok
    full = uniform(GRAPH, PROFILES, CLUSTER, {"infer": "fp32"}, base="bf16")
    assert set(full["infer"].assignment.values()) == {FP32}  # asked for, though it is above the base
    with pytest.raises(UnsupportedError, match="infer lacks fp16"):
        uniform(GRAPH, PROFILES, CLUSTER, {"infer": "fp16"})
    with pytest.raises(FormatError, match="no device class 'other'"):
        uniform(GRAPH, PROFILES, CLUSTER, {"other": "int8"})


# Certificates and reasons.

PLAN = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER)


def tampered(name="infer", **changes) -> Plan:
    return replace(PLAN, classes={**PLAN.classes, name: replace(PLAN.classes[name], **changes)})


def violations(plan, **options):
    options = {"profiles": PROFILES, "sensitivity": SENSITIVITY, "cluster": CLUSTER, **options}
    certificate = check_plan(GRAPH, plan, **options)
    assert certificate.ok == (not certificate.violations)
    return " | ".join(certificate.violations)


def test_a_good_plan_has_no_violation_and_its_numbers_again():
    certificate = check_plan(GRAPH, PLAN, PROFILES, SENSITIVITY, CLUSTER)
    assert certificate.ok
    assert certificate.step_s == PLAN.step_s
    assert certificate.memory_bytes["infer"] == PLAN["infer"].predicted.memory_bytes
    assert certificate.to_json()["ok"] is True


def test_the_check_catches_every_lie():
    predicted = PLAN["infer"].predicted
    assert "a step takes" in violations(tampered(assignment=dict.fromkeys(PLAN["infer"].assignment, FP32)))
    assert "a step takes" in violations(replace(PLAN, target_s=PLAN.step_s * 0.9))
    assert "the plan says a step takes" in violations(replace(PLAN, step_s=PLAN.step_s * 0.9))
    assert "adds a variance of 0" in violations(tampered(predicted=replace(predicted, added_variance=0.0)))
    assert "the plan says infer needs 1 bytes" in violations(
        tampered(predicted=replace(predicted, memory_bytes=1))
    )
    assert "the plan says infer computes for" in violations(
        tampered(predicted=replace(predicted, compute_s=1.0))
    )
    assert "the plan says infer waits" in violations(tampered(predicted=replace(predicted, wait_s=1.0)))
    assert "was made from profile 0123" in violations(tampered(profile_hash="0123"))
    assert "says that none adds less" in violations(replace(PLAN, bound=10 * PLAN.added_variance))
    lowered = PLAN["infer"].lowered[0]
    assert f"{lowered} runs in" in violations(replace(PLAN, pins={lowered: FP32}))
    assert not violations(allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={lowered: "int8"}))


def test_the_check_catches_what_cannot_run():
    everything = {**PLAN["infer"].assignment}
    assert "head runs in fp16 on infer, which has only" in violations(
        tampered(assignment={**everything, "head": Precision.FP16})
    )
    lacking = {**everything, "layer.0.attention": Precision.INT8_ALL}
    assert "which has no kernel" in violations(tampered(assignment=lacking))
    assert "'nose'" in violations(tampered(assignment={**everything, "nose": INT8}))
    ops = {**PROFILES["infer"].ops, PLAN["infer"].lowered[0]: {"fp32": Cost(1.0)}}
    unmeasured = {**PROFILES, "infer": replace(PROFILES["infer"], ops=ops)}
    assert "which was not measured" in violations(PLAN, profiles=unmeasured)
    assert "no device class 'infer'" in violations(replace(PLAN, classes={"train": PLAN["train"]}))
    assert "more than its budget of 1000" in violations(replace(PLAN, budgets={"infer": 1000}))
    assert "no profile of device class 'infer'" in violations(PLAN, profiles={"train": PROFILES["train"]})


def test_every_lowered_operator_has_a_reason_that_replay_confirms():
    reasons = explain(GRAPH, PLAN, PROFILES, SENSITIVITY, CLUSTER)
    assert tuple(reason.op for reason in reasons) == PLAN["infer"].lowered
    for reason in reasons:
        raised = {**PLAN["infer"].assignment, reason.op: reason.raised_to}
        timeline = replay(GRAPH, {"train": {}, "infer": raised}, PROFILES, CLUSTER)
        assert reason.step_if_raised_s == pytest.approx(timeline.step_s)
        assert reason.memory_if_raised_bytes == timeline["infer"].memory_bytes
        assert reason.step_if_raised_s > PLAN.target_s
        assert "over the target" in reason.verdict and reason.verdict.startswith(f"{reason.op} runs in")
        assert reason.variance_regained > 0
    assert sum(reason.added_variance for reason in reasons) == pytest.approx(
        PLAN["infer"].predicted.added_variance
    )


def test_reasons_tell_what_a_product_computes_in_its_epilogue():
    int8 = {**PLAN["infer"].assignment, **dict.fromkeys(("layer.0.fc1", "layer.0.fc2"), Precision.INT8)}
    plan = replace(PLAN, classes={**PLAN.classes, "infer": replace(PLAN["infer"], assignment=int8)})
    verdicts = {r.op: r.verdict for r in explain(GRAPH, plan, PROFILES, SENSITIVITY, CLUSTER)}
    runs = "layer.0.fc1 runs in int8 on infer with layer.0.gelu in its epilogue, which "
    assert verdicts["layer.0.fc1"].startswith(runs)
    assert verdicts["layer.0.fc2"].startswith("layer.0.fc2 runs in int8 on infer, which ")


def test_reasons_tell_memory_and_pins_from_time():
    pinned = allocate(
        GRAPH, PROFILES, SENSITIVITY, CLUSTER, pins={"h*": "bf16"}, lower_all=True, target_s=10.0
    )
    assert [reason.op for reason in explain(GRAPH, pinned, PROFILES, SENSITIVITY, CLUSTER)] == ["head"] * 2
    for reason in explain(GRAPH, pinned, PROFILES, SENSITIVITY, CLUSTER):
        assert reason.verdict.endswith("; it is pinned to that by 'h*'")
    elsewhere = explain(GRAPH, pinned.pin("head", "int8"), PROFILES, SENSITIVITY, CLUSTER)
    assert not any("'h*'" in reason.verdict for reason in elsewhere)
    loose = replace(PLAN, target_s=10.0)
    small = replace(loose, budgets={"infer": 1000})
    assert "it could run in" in explain(GRAPH, loose, PROFILES, SENSITIVITY, CLUSTER)[0].verdict
    tight = explain(GRAPH, small, PROFILES, SENSITIVITY, CLUSTER)[0].verdict
    assert "more than its memory budget" in tight


def test_planning_a_model_of_the_size_of_bert_base_stays_cheap():
    graph = encoder(24, width=768, rows=4096)
    assert len(graph.ops) > 400
    profiles, sensitivity = pair(graph, 1.8, 1e-9), sensitivity_of(graph)
    found = []
    work = num_calls(lambda: found.append(allocate(graph, profiles, sensitivity, CLUSTER)))
    assert found[0]["infer"].lowered and found[0].gap <= 2e-4
    assert work < 4_000_000  # 0.7 s on one core


def test_a_margin_leaves_time_for_being_late():
    """Every lowered class reaches the target even when its compute takes longer; at some variance."""
    tight = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER)
    loose = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, margin=0.05)
    assert loose.target_s == tight.target_s and loose.margin == 0.05 and tight.margin is None
    assert loose["infer"].predicted.compute_s * 1.05 <= loose.target_s
    assert loose["infer"].predicted.compute_s < tight["infer"].predicted.compute_s
    assert loose["infer"].predicted.added_variance > tight["infer"].predicted.added_variance
    assert not loose["train"].lowered
    assert Plan.from_json(loose.to_json()) == loose
    verdicts = [r.verdict for r in explain(GRAPH, loose, PROFILES, SENSITIVITY, CLUSTER)]
    assert any("whenever infer is as late as the plan's margin allows for" in v for v in verdicts)
    assert not any("it could run in" in v for v in verdicts)


def test_a_margin_that_nothing_can_keep_is_kept_in_part():
    """A class so slow that it sets the target keeps what it can: the plan is the one without a margin, or
    faster."""
    slow = {**PROFILES, "infer": profile_of(GRAPH, "infer", slow=40.0)}
    tight = allocate(GRAPH, slow, SENSITIVITY, CLUSTER)
    loose = allocate(GRAPH, slow, SENSITIVITY, CLUSTER, margin=0.2)
    assert loose.step_s <= loose.target_s * (1 + 1e-9) and loose.target_s == tight.target_s
    assert (loose.margin or 0.0) < 0.2 and check_plan(GRAPH, loose, slow, SENSITIVITY, CLUSTER).ok
    classes = {**loose.classes, "infer": replace(loose["infer"], margin=0.2)}
    found = check_plan(GRAPH, replace(loose, classes=classes), slow, SENSITIVITY, CLUSTER).violations
    assert any("as late as the margin of 20.000%" in text for text in found)
    with pytest.raises(FormatError, match="margin must be at least 0 and less than 1, found 1"):
        allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, margin=1)


@pytest.mark.parametrize("slack", [0.02, 0.1, 0.2, 0.3, 0.4, 0.6])
def test_reasons_know_which_classes_a_margin_is_for(slack):
    """Where the strongest class may be lowered, too, it may be late as well."""
    graph = mlp(3, 64, 64)
    profiles, sensitivity = pair(graph, 1.3, 1e-9), sensitivity_of(graph)
    parts = (profiles, sensitivity, CLUSTER)
    plan = allocate(graph, *parts, lower_all=True, margin=0.05, slack=slack)
    assert plan.status == "optimal" and check_plan(graph, plan, *parts).ok
    assert not any("it could run in" in reason.verdict for reason in explain(graph, plan, *parts))

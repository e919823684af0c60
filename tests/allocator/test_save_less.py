"""Operators that save less for backward: the solver prices their forms as replay does, and are a lever."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from graphs import (
    CPU_PRECISIONS,
    Builder,
    assignments_for,
    cluster_of,
    encoder,
    graphs,
    images,
    mlp,
    profile_of,
    sensitivity_of,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.allocator import allocate, check_plan, explain, find_warnings, search, shadow_prices
from qsync.allocator.block_levers import block_levers
from qsync.allocator.constraints import Constraints
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.memory_lower_bound import saved_bytes
from qsync.allocator.solvers.milp_expressions import Sum, total
from qsync.commands.tables import lever_lines
from qsync.errors import FormatError, InfeasibleError, MismatchError
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import StepMemory
from qsync.records.levers import Levers
from qsync.records.plans import Plan
from qsync.records.save_less import ops_that_save_less
from qsync.replayer import Recapture, replay

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


def chain(kind, num_layers=3, rows=16, width=16):
    """Blocks of linear, gelu or relu, and a view of it, whose reader may keep the activation's result."""
    builder = Builder(kind)
    x = builder.enter("x", (rows, width))
    for layer in range(num_layers):
        x = builder.linear(f"{layer}.fc", x, width)
        x = builder.op(f"{layer}.view", "view", "following", [builder.follow(f"{layer}.act", kind, x)])
    builder.loss("loss", x)
    return builder.build()


def state_of(graph, patterns=("*",), **options):
    profiles = {"infer": profile_of(graph, saving=1.3, latency_s=1e-8, cast_s=1e-11)}
    less = {"infer": patterns}
    return State(
        make_problem(
            graph,
            profiles,
            sensitivity_of(graph),
            cluster_of({"infer": 2}),
            Constraints(saving_less=less, **options),
        )
    )


def sums_at(linear, wanted, assignment):
    """The least that a sum can be where these precisions are chosen."""
    fixed = [
        (linear.chosen[op][p], 1.0, 1.0) for op, p in assignment.items() if not linear.chosen[op][p].settled
    ]
    if not linear.program.num_columns:
        return wanted.constant
    found = linear.program.solve(wanted, also=fixed)
    return wanted.constant + found.fun if found.x is not None else -float("inf")


@pytest.mark.parametrize(
    "graph", [encoder(2), images(2), mlp(4), chain("relu")], ids=lambda graph: graph.model
)
@pytest.mark.parametrize("patterns", [("*",), ("*0*",)], ids=["all", "some"])
def test_sums_of_time_are_replay_s_and_those_of_memory_what_the_model_says(graph, patterns):
    state, draw = state_of(graph, patterns), random.Random(0)
    one = state.classes["infer"]
    assert one.part.saving_less == set(ops_that_save_less(graph, patterns)) != set()
    linear = ClassModel(graph, one.part, 1.0, float("inf"))
    seconds, kept = Sum(), Sum()
    seconds.add(total([*linear.forward_s, *linear.backward_s]), 1e6)
    kept.add(saved_bytes(linear, graph, "cpu"), 1e-3)
    for _ in range(10):
        weights = {p: draw.random() for p in CPU_PRECISIONS}
        drawn = {
            op: draw.choices(options, [weights[p] for p in options])[0]
            for op, options in one.part.choices.items()
        }
        state.move("infer", drawn)
        assert sums_at(linear, seconds, drawn) == pytest.approx(1e6 * one.costs.total_s, rel=1e-9)
        assert one.seconds_at(drawn) == pytest.approx(one.costs.total_s, rel=1e-12)
        curve, when = StepMemory(one.lowering.lowered(), num_ranks=2).curve(), len(graph.ops)
        waiting = curve["casts"][when] + curve["saved"][when]
        in_use = waiting + curve["transient"][when]
        assert 0.85 * waiting <= 1e3 * sums_at(linear, kept, drawn) <= in_use + 1e-3


@given(st.data())
def test_rows_of_memory_never_say_more_than_the_model(data):
    graph = data.draw(graphs())
    assume(graph.adjustable and ops_that_save_less(graph, ["*"]))
    state = state_of(graph)
    one = state.classes["infer"]
    linear = ClassModel(graph, one.part, 1.0, float("inf"))
    drawn = data.draw(assignments_for(graph, CPU_PRECISIONS))
    drawn = {op: p for op, p in drawn.items() if p in one.part.choices[op]}
    kept, seconds = Sum(), Sum()
    device = data.draw(st.sampled_from(["cpu", "cuda"]))
    kept.add(saved_bytes(linear, graph, device), 1e-3)
    seconds.add(total([*linear.forward_s, *linear.backward_s]), 1e6)
    least = sums_at(linear, seconds, drawn)
    assume(least > -float("inf"))  # some cast may have no price
    state.move("infer", drawn)
    assert least == pytest.approx(1e6 * one.costs.total_s, rel=1e-9)
    memory = StepMemory(one.lowering.lowered(), num_ranks=2, device=device)
    curve, when = memory.curve(), len(graph.ops)
    in_use = sum(curve[what][when] for what in ("casts", "saved", "transient"))
    assert 1e3 * sums_at(linear, kept, drawn) <= in_use + 1e-3


# --- Plans ---

GRAPH = encoder(2, width=16, rows=256)
CLUSTER, SENSITIVITY = cluster_of(), sensitivity_of(GRAPH)


def pair(graph, slow=1.2, **changes):
    return {
        name: profile_of(graph, name, slow=s, latency_s=1e-8, cast_s=1e-11, **changes)
        for name, s in (("train", 1.0), ("infer", slow))
    }


PROFILES = pair(GRAPH, saving=1.3)
PARTS = (GRAPH, PROFILES, SENSITIVITY, CLUSTER)
LESS = {"infer": ["layer.0.*", "layer.1.gelu"]}


def peak_of(parts, **options):
    """Bytes of the weak class with every operator in FP32."""
    return allocate(*parts, pins={"*": "fp32"}, target_s=1.0, **options)["infer"].predicted.memory_bytes


def test_a_plan_carries_what_saves_less_and_everybody_agrees_on_it(tmp_path):
    profiles = pair(GRAPH, 2.5, saving=1.3)
    plan = allocate(GRAPH, profiles, SENSITIVITY, CLUSTER, saving_less=LESS)
    assert plan["infer"].saving_less == tuple(LESS["infer"]) and plan["train"].saving_less == ()
    assert plan["infer"].lowered and check_plan(GRAPH, plan, profiles, SENSITIVITY, CLUSTER).ok
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    again = replay(GRAPH, plan, profiles, CLUSTER)
    assert (again.step_s, again["infer"].memory_bytes) == (plan.step_s, plan["infer"].predicted.memory_bytes)
    forms = {node.op: node.form for node in again["infer"].nodes if getattr(node, "form", "plain") != "plain"}
    assert {"layer.0.gelu", "layer.0.norm1", "layer.1.gelu"} <= forms.keys() and "layer.1.norm1" not in forms
    for reason in explain(GRAPH, plan, profiles, SENSITIVITY, CLUSTER):
        raised = {**plan["infer"].assignment, reason.op: reason.raised_to}
        other = replace(plan.classes["infer"], assignment=raised)
        step_s = replay(GRAPH, replace(plan, classes={**plan.classes, "infer": other}), profiles, CLUSTER)
        assert reason.step_if_raised_s == pytest.approx(step_s.step_s, rel=1e-9)
    assert shadow_prices(GRAPH, plan, profiles, SENSITIVITY, CLUSTER)
    plain = replace(plan, classes={**plan.classes, "infer": replace(plan["infer"], saving_less=())})
    assert not check_plan(GRAPH, plain, profiles, SENSITIVITY, CLUSTER).ok
    assert [text for text in find_warnings(GRAPH, plan, profiles, CLUSTER) if "eight-bit codes" in text]
    assert not [text for text in find_warnings(GRAPH, allocate(*PARTS), profiles, CLUSTER) if "codes" in text]


@pytest.mark.parametrize(
    ("graph", "budget"),
    [
        (chain("relu", 4), None),
        (mlp(4), None),
        (images(2), None),
        (mlp(4, rows=512), 0.9),
        (images(2, rows=32), 0.7),
    ],
    ids=["relu", "mlp", "images", "mlp in little memory", "images in little memory"],
)
def test_brute_force_finds_nothing_better_where_some_save_less(graph, budget):
    parts = (graph, pair(graph, 1.6, saving=1.2), sensitivity_of(graph), CLUSTER)
    less = {"infer": ["*0*", "*2*"]}
    budgets = {"infer": int(budget * peak_of(parts))} if budget else {}
    options = {"saving_less": less, "budgets": budgets, "slack": 0.04}
    plan = allocate(*parts, **options, gap=0.0)
    limit = budgets.get("infer", 1 << 60)
    part = make_problem(*parts, Constraints(**{k: v for k, v in options.items() if k != "slack"})).classes[
        "infer"
    ]
    found = []
    for chosen in itertools.product(*part.choices.values()):
        assignment = dict(zip(part.choices, chosen, strict=True))
        entry = replace(plan["infer"], assignment=assignment)
        timeline = replay(graph, replace(plan, classes={**plan.classes, "infer": entry}), parts[1], CLUSTER)
        if timeline.step_s <= plan.target_s * (1 + 1e-9) and timeline["infer"].memory_bytes <= limit:
            found.append(sum(part.variance[op][p] for op, p in assignment.items()))
    assert plan.added_variance == pytest.approx(min(found), rel=1e-6) and min(found) > 0.0
    assert plan.bound <= min(found) * (1 + 1e-6)


# --- The lever ---


def less_of(graph, profile):
    """By block: the patterns of what saves less there."""
    return {block.path: block.patterns for block in block_levers(graph, profile, ["save_less"])}


def test_blocks_save_less_one_by_one_where_that_was_timed():
    assert less_of(GRAPH, PROFILES["infer"]) == {f"layer.{k}": (f"layer.{k}.*",) for k in (0, 1)}
    assert less_of(mlp(2), profile_of(mlp(2), saving=1.2)) == {"": ("*",)}
    assert less_of(GRAPH, profile_of(GRAPH)) == {}
    ops = dict(PROFILES["infer"].ops)
    ops["layer.1.gelu"] = {
        mode: cost for mode, cost in ops["layer.1.gelu"].items() if mode.split()[-1] in ("fp32", "fused")
    }
    rest = ("layer.1.drop1", "layer.1.norm1", "layer.1.drop2", "layer.1.norm2")
    found = less_of(GRAPH, replace(PROFILES["infer"], ops=ops))
    assert found == {"layer.0": ("layer.0.*",), "layer.1": rest}
    # Nor does a gelu whose product was never timed without it in its epilogue.
    ops = dict(PROFILES["infer"].ops)
    ops["layer.1.fc1"] = {mode: cost for mode, cost in ops["layer.1.fc1"].items() if mode != "int8"}
    assert less_of(GRAPH, replace(PROFILES["infer"], ops=ops)) == found


def test_forms_that_have_no_time_are_refused_before_anything_is_solved():
    """A relu whose result is kept anyway has its price in FP32, but none beside another precision."""
    graph = chain("relu")
    profiles = {"infer": profile_of(graph, saving=1.2)}
    bare = {mode: cost for mode, cost in profiles["infer"].ops["1.act"].items() if "bits" not in mode}
    profiles["infer"] = replace(profiles["infer"], ops={**profiles["infer"].ops, "1.act": bare})
    parts = (graph, profiles, sensitivity_of(graph), cluster_of({"infer": 2}))
    with pytest.raises(MismatchError, match="no time of 1.act in fp32 bits .* again with save_less=True"):
        make_problem(*parts, Constraints(saving_less={"infer": ["*"]}))
    assert make_problem(*parts, Constraints(saving_less={"infer": ["0.*"]})).classes["infer"].saving_less == {
        "0.act"
    }


def test_saving_less_is_preferred_to_lower_precision_where_memory_binds_and_the_target_has_room():
    budgets = {"infer": int(0.9 * peak_of(PARTS))}
    plain = allocate(*PARTS, target_s=1.0, budgets=budgets)
    plan = search(*PARTS, levers=["save_less"], target_s=1.0, budgets=budgets)
    assert plan.added_variance == 0.0 < plain.added_variance and plan["infer"].saving_less
    assert check_plan(GRAPH, plan, PROFILES, SENSITIVITY, CLUSTER).ok
    without = plan.levers.without["save_less"]
    assert (without.step_s, without.added_variance) == (plain.step_s, plain.added_variance)
    # Nobody whose memory is enough saves less.
    assert plan["train"].saving_less == ()
    assert plan["infer"].saving_less == ("layer.0.*",)
    with pytest.raises(InfeasibleError):
        allocate(*PARTS, target_s=1.0, budgets=budgets, pins={"*": "fp32"})
    pinned = {"target_s": 1.0, "budgets": budgets, "pins": {"*": "fp32"}}
    plan = search(*PARTS, levers=["save_less"], **pinned)
    assert plan.levers.without["save_less"].reason == "nothing fits in memory"


def test_saving_less_is_never_picked_where_nothing_is_gained():
    assert search(*PARTS, levers=["save_less"], slack=0.1).levers is None
    off = search(*PARTS, levers=["buckets"], slack=0.1)
    assert not any(entry.saving_less for entry in off.classes.values())


def test_without_times_of_it_the_lever_is_left_out_and_the_plan_says_so():
    profiles = pair(GRAPH)
    parts = (GRAPH, profiles, SENSITIVITY, CLUSTER)
    smaller = encoder(2, width=16, rows=128)
    plan = search(*parts, other=Recapture(smaller, {}), slack=0.1)
    assert "profile with save_less=True" in plan.levers.untried["save_less"]
    assert Levers.from_json(plan.levers.to_json()) == plan.levers
    assert any(line.startswith("save_less was not tried: no profile has") for line in lever_lines(plan))
    with pytest.raises(MismatchError, match="no profile has times .* profile with save_less=True, or leave"):
        search(*parts, levers=["save_less"])
    with pytest.raises(FormatError, match="what saves less is given, and to be searched too"):
        search(*PARTS, levers=["save_less"], saving_less=LESS)
    with pytest.raises(MismatchError, match=r"no time of layer.0.drop1 in fp32 bits.*save_less=True"):
        allocate(*parts, saving_less=LESS)
    with pytest.raises(MismatchError, match="makes 'layr.0.gelu' save less.*nearest: 'layer.0.gelu'"):
        allocate(*PARTS, saving_less={"infer": ["layr.0.gelu"]})
    with pytest.raises(FormatError, match="no device class 'weak'"):
        allocate(*PARTS, saving_less={"weak": ["*"]})


def test_every_shortcut_of_a_search_knows_who_saves_less():
    """Classes that begin alike, and memory after many changes."""
    graph, cluster = encoder(8, width=8, rows=16), cluster_of({"infer": 1, "other": 1, "train": 1})
    profiles = {name: profile_of(graph, name, saving=1.3) for name in ("infer", "other", "train")}
    less = {"infer": ["layer.3.*"], "train": ["layer.3.*"]}
    state = State(
        make_problem(graph, profiles, sensitivity_of(graph), cluster, Constraints(saving_less=less))
    )
    infer, other, train = (state.classes[name] for name in ("infer", "other", "train"))
    coded, as_well, plain = (
        [run.op for run in one.lowering.lowered().nodes if getattr(run, "form", "plain") != "plain"]
        for one in (infer, train, other)
    )
    assert coded == as_well != plain == []
    assert infer.peak_bytes == train.peak_bytes != other.peak_bytes
    state.move("infer", dict.fromkeys(infer.part.choices, INT8))
    assert infer.peak_bytes == StepMemory(infer.lowering.lowered(), num_ranks=3, device="cpu").peak_bytes

"""Levers of blocks in the solver's program: priced as replay does, counted as memory does, and best."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from graphs import chain, cluster_of, encoder, images, mlp, profile_of, sensitivity_of

from qsync.allocator import allocate, check_plan, search
from qsync.allocator.block_levers import KEEP, LESS, RECOMPUTED, block_levers
from qsync.allocator.constraints import Constraints
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import fastest_start, milp
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.memory_lower_bound import bytes_around, saved_bytes
from qsync.allocator.solvers.memory_rows import SCALED, MemoryRows
from qsync.allocator.solvers.milp_expressions import Sum, total
from qsync.allocator.solvers.moments import LOSS, Moment, moments
from qsync.errors import InfeasibleError
from qsync.predictor.memory.peak import StepMemory
from qsync.replayer import Recapture, profiles_under_levers
from qsync.replayer.levers.apply import profile_under

LEVERS = ("recompute", "save_less")
STATE_BYTES = 5056


def state_of(graph, device="cpu", profile=None, **options):
    profile = profile or profile_of(graph, saving=1.3, latency_s=1e-8, cast_s=1e-11)
    given = Constraints(block_levers=LEVERS, budgets={"infer": 1}, **options)
    cluster = cluster_of({"infer": 2}, device=device)
    return State(make_problem(graph, {"infer": profile}, sensitivity_of(graph), cluster, given))


def drawn_point(state, linear, draw, wanted):
    """Draw levers and precisions; return their state, and the least value of a sum there."""
    part = state.plain("infer").part
    treatment = tuple(draw.choice(block.options) for block in part.blocks)
    assignment = {op: draw.choice(options) for op, options in part.choices.items()}
    state.treat("infer", treatment)
    state.move("infer", assignment)
    fixed = [
        (binary, float(lever == own), float(lever == own))
        for of, own in zip(linear.levers, treatment, strict=True)
        for lever, binary in of.items()
    ]
    chosen = [linear.chosen[op][p] for op, p in assignment.items()]
    fixed += [(binary, 1.0, 1.0) for binary in chosen if not binary.settled]
    found = linear.program.solve(wanted(), also=fixed)
    assert found.x is not None
    return state.classes["infer"], found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("graph", [encoder(2), chain(3), images(2), mlp(3)], ids=lambda graph: graph.model)
def test_seconds_under_levers_of_blocks_are_replay_s(graph, device):
    state, draw = state_of(graph, device), random.Random(0)
    linear, seconds = ClassModel(graph, state.plain("infer").part, 1.0, math.inf), Sum()
    seconds.add(total([*linear.forward_s, *linear.backward_s]), 1e6)
    for _ in range(6):
        one, found = drawn_point(state, linear, draw, lambda: seconds)
        assert seconds.constant + found.fun == pytest.approx(1e6 * one.costs.total_s, rel=1e-9)


def test_seconds_in_several_passes_are_replay_s_too():
    graph, other = encoder(2), Recapture(encoder(2, rows=16), {})
    profile = profile_of(graph, saving=1.3)
    state = state_of(graph, profile=profile_under(graph, profile, levers_of(2), other, "cpu"))
    part = state.plain("infer").part
    linear, seconds = ClassModel(graph, part, 1.0, math.inf), Sum()
    seconds.add(total([*linear.forward_s, *linear.backward_s]), 1e6)
    one, found = drawn_point(state, linear, random.Random(3), lambda: seconds)
    assert RECOMPUTED in one.treatment and one.part.profile.setting.levers.passes == 2
    assert seconds.constant + found.fun == pytest.approx(1e6 * one.costs.total_s, rel=1e-9)


def levers_of(passes):
    from qsync.records.levers import ClassLevers

    return ClassLevers(passes=passes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("graph", "near"),
    [(encoder(3, width=16, rows=256), 0.9), (chain(3), 0.6), (images(2), 0.7)],
    ids=lambda of: getattr(of, "model", ""),
)
def test_rows_of_any_moment_count_no_more_than_the_model_and_at_the_peak_nearly_as_much(graph, near, device):
    state, draw = state_of(graph, device), random.Random(1)
    linear = ClassModel(graph, state.plain("infer").part, 1.0, math.inf)
    for _ in range(5):
        one, _ = drawn_point(state, linear, draw, lambda: Sum({0: 0.0}))
        memory = StepMemory(one.lowering.lowered(), num_ranks=2, device=device)
        in_use = memory.come_and_go() + STATE_BYTES * one.treatment.count(RECOMPUTED)
        for when in (int(in_use.argmax()), *draw.sample(range(len(in_use)), 2)):
            moment = moments(memory.layout, linear.block)[when]
            counted = saved_bytes(linear, graph, device, moment)
            for binary, num_bytes in bytes_around(linear, graph, device, True, moment):
                counted.add(binary, num_bytes)
            fixed = [
                (linear.chosen[op][one.precision(op)], 1.0, 1.0)
                for op in one.part.choices
                if not linear.chosen[op][one.precision(op)].settled
            ]
            fixed += [(of[own], 1.0, 1.0) for of, own in zip(linear.levers, one.treatment, strict=True)]
            found = linear.program.solve(counted, also=fixed)
            assert counted.constant + found.fun <= in_use[when] + 1e-3
            if when == int(in_use.argmax()):
                assert counted.constant + found.fun >= near * in_use[when]


def test_the_optimizer_s_workspace_counts_at_the_end_of_backward():
    graph = chain(2)
    profile = replace(profile_of(graph, saving=1.3), optimizer_workspace_bytes=10**9)
    state = state_of(graph, profile=profile)
    one = state.classes["infer"]
    when = int(one.bytes_by_time().argmax())
    linear = ClassModel(graph, one.part, 1.0, math.inf)
    rows = MemoryRows(linear, one.part, 2)
    assert moments(StepMemory(one.lowering.lowered()).layout, linear.block)[when] == Moment(0) != LOSS
    assert rows.tighten([], one) and rows._of[Moment(0)].constant == 10**9


def test_a_row_that_misses_bytes_is_corrected_by_them():
    graph = encoder(2, width=16, rows=256)
    state = state_of(graph)
    part = state.plain("infer").part
    linear = ClassModel(graph, part, 1.0, math.inf)
    rows = MemoryRows(linear, part, 2)
    for is_first in (True, False):
        one, found = drawn_point(state, linear, random.Random(0), lambda: total(rows._of.values()))
        assert rows.is_exact and rows.tighten(found.x, one) is is_first
    assert not rows.is_exact
    excess = max(row.at(found.x) for row, _, _ in rows.rows())
    assert excess == pytest.approx(
        SCALED * (one.peak_bytes - part.budget_bytes) / part.budget_bytes, abs=2 * SCALED
    )


@pytest.mark.parametrize(
    ("memory", "time"), [(0.95, 0.95), (0.9, 1.05), (0.9, 1.3), (0.8, 1.05), (0.8, 1.3), (0.6, 1.05)]
)
def test_brute_force_over_precisions_and_all_levers_finds_nothing_better(memory, time):
    graph = chain(3)
    cluster, sensitivity = cluster_of(), sensitivity_of(graph)
    profiles = {
        name: profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=1e-11, saving=1.3)
        for name, slow in (("train", 1.0), ("infer", 1.5))
    }
    parts = (graph, profiles, sensitivity, cluster)
    whole = allocate(*parts, pins={"*": "fp32"}, target_s=10.0)
    budgets = {"infer": int(memory * whole["infer"].predicted.memory_bytes)}
    target_s = time * whole.step_s
    state = State(make_problem(*parts, Constraints(budgets=budgets, block_levers=LEVERS)))
    part, best = state.classes["infer"].part, math.inf
    for treatment in itertools.product(*(block.options for block in part.blocks)):
        for chosen in itertools.product(*part.choices.values()):
            assignment = dict(zip(part.choices, chosen, strict=True))
            variance = sum(part.variance[op][p] for op, p in assignment.items())
            if variance < best:
                with state.tried("infer", assignment, treatment) as one:
                    if one.fits() and state.step_s() <= target_s * (1 + 1e-9):
                        best = variance
    options = {"budgets": budgets, "target_s": target_s, "gap": 0.0, "block_levers": LEVERS}
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            allocate(*parts, **options)
        return
    plan = allocate(*parts, **options)
    assert plan.added_variance == pytest.approx(best, rel=1e-6)
    assert plan.bound <= best * (1 + 1e-6) and plan["infer"].predicted.memory_bytes <= budgets["infer"]
    under = profiles_under_levers(graph, profiles, cluster, plan.levers)
    assert check_plan(graph, plan, under, sensitivity, cluster).ok


def test_without_enumeration_a_tight_budget_has_a_tight_bound(monkeypatch):
    monkeypatch.setattr(milp, "MAX_REPLAYED", 0)
    graph = encoder(3, rows=128)
    profiles = {n: profile_of(graph, n, slow=s, saving=1.3) for n, s in (("train", 1.0), ("infer", 1.3))}
    parts = (graph, profiles, sensitivity_of(graph), cluster_of())
    whole = allocate(*parts, pins={"*": "fp32"}, target_s=10.0)
    budgets = {"infer": int(0.85 * whole["infer"].predicted.memory_bytes)}
    plan = allocate(*parts, budgets=budgets, target_s=whole.step_s, block_levers=LEVERS)
    alone = allocate(*parts, budgets=budgets, target_s=whole.step_s)
    assert plan.added_variance < 0.5 * alone.added_variance and plan.gap < 0.01


def test_any_block_may_be_chosen_and_no_more_than_memory_asks_for():
    graph = chain(4)
    profiles = {"infer": profile_of(graph, saving=1.3), "train": profile_of(graph, "train")}
    # The first block takes so long that another one is recomputed.
    ops = dict(profiles["infer"].ops)
    for op in ("0.fc", "0.act"):
        ops[op] = {mode: cost._replace(forward_s=30 * cost.forward_s) for mode, cost in ops[op].items()}
    profiles["infer"] = replace(profiles["infer"], ops=ops)
    parts = (graph, profiles, sensitivity_of(graph), cluster_of())
    whole = allocate(*parts, pins={"*": "fp32"}, target_s=10.0)["infer"].predicted.memory_bytes
    plan = search(
        *parts, levers=["recompute"], budgets={"infer": int(0.93 * whole)}, target_s=1.0, pins={"*": "fp32"}
    )
    assert plan.levers["infer"].recomputed and "0" not in plan.levers["infer"].recomputed
    assert plan.levers["train"].recomputed == () and plan.added_variance == 0.0
    roomy = search(*parts, levers=["recompute"], target_s=1.0)
    assert roomy.levers is None


def test_what_a_block_may_do_depends_on_what_it_holds():
    graph = images(2)
    blocks = block_levers(graph, profile_of(graph, saving=1.3), LEVERS)
    assert [block.options for block in blocks] == [(KEEP, LESS)] * 2  # batch norms count once
    (first, *_), bare = block_levers(chain(2), profile_of(chain(2)), LEVERS), profile_of(mlp(2))
    assert first.options == (KEEP, RECOMPUTED) and first.less == ()
    assert block_levers(mlp(2), bare, LEVERS) == ()


def test_levers_that_time_ended_make_way_for_precisions_that_are_faster(monkeypatch):
    """The first solution with levers may be rough: here any that fits."""
    monkeypatch.setattr(fastest_start, "_FIRST_GAP", 50.0)
    graph = encoder(3)

    def started(budget, levers):
        profile = profile_of(graph, saving=1.3, latency_s=1e-8, cast_s=1e-11)
        given = Constraints(block_levers=levers, budgets={"infer": budget})
        problem = make_problem(
            graph, {"infer": profile}, sensitivity_of(graph), cluster_of({"infer": 2}), given
        )
        state = State(problem)
        fastest_start.fastest_start(state, "infer", limit_s=0.0)
        return state.classes["infer"]

    budget = int(0.95 * started(2**50, ()).peak_bytes)
    alone, found = started(budget, ()), started(budget, LEVERS)
    assert found.fits() and found.own_s <= alone.own_s
    assert set(found.treatment) == {KEEP}

"""The solvers where memory is short: bytes count in the order of raises and in compensating changes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync.allocator import allocate
from qsync.allocator.problem import Constraints, make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import milp, precision_recovery
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.greedy import greedy
from qsync.allocator.solvers.milp_expressions import Program, Sum
from qsync.records.plans import Plan
from qsync.records.precision import Precision

GRAPH = encoder(3, rows=512)
PROFILES = {
    name: profile_of(GRAPH, name, slow=slow, latency_s=1e-8, cast_s=1e-11)
    for name, slow in (("train", 1.0), ("infer", 1.8))
}


def sensitivity(seed):
    draw, found = Random(seed), sensitivity_of(GRAPH)
    omega = {
        op: {p: v * 10 ** draw.uniform(-2, 2) for p, v in modes.items() if p != "fp32_fast"}
        for op, modes in found.omega.items()
    }
    return replace(found, omega=omega)


def short(seed, memory, time):
    """Its budget and target lie so far between what the fastest start needs and what FP32 does."""
    state = State(make_problem(GRAPH, PROFILES, sensitivity(seed), cluster_of()))
    most, slowest_s = state.classes["infer"].peak_bytes, state.step_s()
    fastest_start(state, "infer")
    least = state.classes["infer"].peak_bytes
    budgets = {"infer": int(least + memory * (most - least))}
    state = State(
        make_problem(GRAPH, PROFILES, sensitivity(seed), cluster_of(), Constraints(budgets=budgets))
    )
    fastest_start(state, "infer")
    return state, state.step_s() + time * (slowest_s - state.step_s())


def found(*short_of):
    state, target = short(*short_of)
    greedy(state, ["infer"], target)
    assert precision_recovery.holds(state, target)
    return state.variance


def test_bytes_count_where_memory_is_short(monkeypatch):
    with_bytes = found(2, 0.6, 0.6)
    monkeypatch.setattr(precision_recovery, "_memory_used", lambda *args: 0)
    assert found(2, 0.6, 0.6) > 1.4 * with_bytes


def test_a_raise_uses_its_part_of_the_memory_that_is_left():
    state, _ = short(2, 0.6, 0.6)
    one = state.classes["infer"]
    used = 0
    for op, choices in one.part.choices.items():
        before, left = one.peak_bytes, one.part.budget_bytes - one.peak_bytes
        part = precision_recovery._memory_used(state, "infer", {op: choices[-1]})
        assert one.peak_bytes == before
        move = state.move("infer", {op: choices[-1]})
        assert part * left == pytest.approx(one.peak_bytes - before)
        used += one.peak_bytes > before
        state.back(move)
    assert used and left > 0.02 * one.part.budget_bytes
    assert precision_recovery._memory_used(state, "train", {op: Precision.FP32}) == 0.0


def test_a_raise_is_judged_by_the_part_of_the_time_left_that_it_uses():
    state, target = short(2, 1.0, 0.6)
    structure = state.classes["infer"].structural_classes()
    slack_s = precision_recovery._Trial(state, target).slack_s("infer")
    raises = [raised for _, raised in precision_recovery._raises(state, ["infer"])]
    expected = [state.seconds_of("infer", raised, structure) / slack_s for raised in raises]
    seen = []
    precision_recovery.recover(state, ["infer"], target, lambda regained, used: seen.append(used) or regained)
    assert seen[: len(raises)] == pytest.approx(expected) and max(expected) > 0.0


def test_what_is_known_of_a_class_is_measured_again_before_it_is_turned_away(monkeypatch):
    state, target = short(2, 1.0, 0.6)
    trial = precision_recovery._Trial(state, target)
    measured, least_times = [], precision_recovery._least_times
    monkeypatch.setattr(
        precision_recovery, "_least_times", lambda state: measured.append(1) or least_times(state)
    )
    assert trial.may_hold("infer") and not measured
    trial._beyond_own_s["infer"] += target  # as if another class had been slower
    assert trial.may_hold("infer") and len(measured) == 1


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_a_class_may_lose_what_lateness_leaves_of_the_target(margin):
    state, target = short(2, 1.0, 0.6)
    state.late = {"infer": margin}
    one = state.classes["infer"]
    slack_s = precision_recovery._Trial(state, 2 * target).slack_s("infer")
    beyond_s = precision_recovery._least_times(state)["infer"] - (1 + margin) * one.alone_s
    assert (1 + margin) * (one.alone_s + slack_s) + beyond_s == pytest.approx(2 * target)


@pytest.mark.parametrize("short_of", [(0, 0.3, 0.5), (1, 0.1, 0.3), (2, 0.6, 0.6)])
def test_the_exact_solver_adds_no_more_than_greedy_where_memory_is_short(short_of):
    state, target = short(*short_of)
    budgets = {"infer": state.classes["infer"].part.budget_bytes}
    exact, fast = (
        allocate(
            GRAPH, PROFILES, sensitivity(short_of[0]), cluster_of(),
            budgets=budgets, target_s=target, solver=solver, time_limit_s=3.0,
        )
        for solver in ("milp", "greedy")
    )  # fmt: skip
    assert exact.bound <= exact.added_variance * (1 + 1e-9) <= fast.added_variance * (1 + 2e-9)


def test_what_is_kept_for_backward_raises_the_bound_where_memory_is_short(monkeypatch):
    bounds = []
    for kept in (milp.saved_bytes, lambda *args: Sum()):
        monkeypatch.setattr(milp, "saved_bytes", kept)
        state, target = short(0, 0.3, 1.0)
        greedy(state, ["infer"], target)
        bounds.append(milp.improve_and_bound(state, ["infer"], target).bound)
    assert bounds[0] > 1.5 * bounds[1]


def test_the_plan_says_why_it_is_not_proved_to_be_the_best(monkeypatch):
    def status(**options):
        plan = allocate(GRAPH, PROFILES, sensitivity(0), cluster_of(), **options)
        assert Plan.from_json(plan.to_json()) == plan
        return plan.status

    state, target = short(0, 0.3, 1.0)
    budgets = {"infer": state.classes["infer"].part.budget_bytes}
    assert status() == "optimal"
    assert status(budgets=budgets, target_s=target, solver="greedy") == "unproved"
    assert status(slack=0.1, solver="greedy", gap=0.99) == "optimal"
    solve = Program.solve
    for code, said in ((1, "time-limited"), (4, "unsolved")):

        def stopped(self, *args, code=code, **options):
            result = solve(self, *args, **options)
            result.status = code
            return result

        monkeypatch.setattr(Program, "solve", stopped)
        assert status(budgets=budgets, target_s=target, solver="greedy") == said

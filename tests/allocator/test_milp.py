"""The exact solver: its sums are replay's, its plans are brute force's, its bound is one."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from graphs import CPU_PRECISIONS, cluster_of, encoder, graphs, images, mlp, profile_of, sensitivity_of
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync.allocator import allocate, check_plan, frontier
from qsync.allocator.constraints import Constraints
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import memory_rows, milp
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.milp_expressions import ONE, ZERO, IntegerProgram, Sum, negated, total
from qsync.allocator.solvers.precision_recovery import holds
from qsync.errors import FormatError
from qsync.operators.precision import Precision
from qsync.records.cluster import Link
from qsync.records.plans import Plan
from qsync.records.profiles import Cost, Profile

INT8, FP32 = Precision.INT8, Precision.FP32


def pair(graph, slow=1.8, cast_s=1e-11):
    return {
        name: profile_of(graph, name, slow=s, latency_s=1e-8, cast_s=cast_s)
        for name, s in (("train", 1.0), ("infer", slow))
    }


def varied(graph, seed):
    """A sensitivity in which operators differ by a hundred times."""
    draw, found = random.Random(seed), sensitivity_of(graph)
    omega = {
        op: {p: v * 10 ** draw.uniform(-1, 1) for p, v in modes.items()} for op, modes in found.omega.items()
    }
    return replace(found, omega=omega)


def begun(graph, *, slow=1.8, cast_s=1e-11, link=None, budget=None, seed=0, slack=0.02, cap=None, pins=None):
    """A problem at its fastest start, with a target a little longer."""
    parts = (pair(graph, slow, cast_s), varied(graph, seed), cluster_of(link=link or Link(1e-6, 1e9)))
    state = State(make_problem(graph, *parts, Constraints(bucket_cap_bytes=cap, pins=pins)))
    most = state.classes["infer"].peak_bytes
    fastest_start(state, "infer")
    if budget is not None:  # between what the fastest start needs and what FP32 does
        least = state.classes["infer"].peak_bytes
        budgets = {"infer": int(least + budget * (most - least))}
        state = State(make_problem(graph, *parts, Constraints(budgets=budgets, pins=pins)))
        fastest_start(state, "infer")
    return state, state.step_s() * (1 + slack)


@pytest.mark.parametrize("graph", [encoder(2), images(2), mlp(4)], ids=lambda graph: graph.model)
def test_the_sums_are_what_replay_makes_of_every_assignment(graph):
    state = State(make_problem(graph, pair(graph), sensitivity_of(graph), cluster_of()))
    one = state.classes["infer"]
    linear = ClassModel(graph, one.part, 1.0, float("inf"))
    seconds = Sum()
    seconds.add(total([*linear.forward_s, *linear.backward_s]), 1e6)  # HiGHS looks no closer than a millionth
    draw = random.Random(0)
    for _ in range(12):
        weights = {p: draw.random() for p in CPU_PRECISIONS}
        drawn = {
            op: draw.choices(options, [weights[p] for p in options])[0]
            for op, options in one.part.choices.items()
        }
        state.move("infer", drawn)
        fixed = [
            (linear.chosen[op][p], 1.0, 1.0) for op, p in drawn.items() if not linear.chosen[op][p].settled
        ]
        found = linear.program.solve(seconds, also=fixed)
        assert found.fun + seconds.constant == pytest.approx(1e6 * one.costs.total_s, rel=1e-9)
        assert linear.assignment(found.x) == drawn


@pytest.mark.parametrize("budget", [None, 0.6, 0.2])
@pytest.mark.parametrize("graph", [mlp(5), images(2)], ids=lambda graph: graph.model)
@pytest.mark.parametrize("seed", range(3))
def test_brute_force_finds_nothing_better(graph, budget, seed):
    link = (Link(0.0, 1e30), Link(1e-6, 1e9), Link(1e-7, 1e8, 0.5))[seed]
    state, target = begun(graph, slow=1.5 + 0.4 * seed, link=link, budget=budget, seed=seed)
    assert_exact(state, target)


def assert_exact(state: State, target: float) -> None:
    """The solver's plan is the best of all that replay finds within the target."""
    part = state.classes["infer"].part
    solution = milp.solve(state, ["infer"], target, time_limit_s=60)
    assert holds(state, target) and state.assignments() == solution.assignments
    least = min(
        sum(part.variance[op][p] for op, p in zip(part.choices, chosen, strict=True))
        for chosen in itertools.product(*part.choices.values())
        if state.move("infer", dict(zip(part.choices, chosen, strict=True)))
        and state.late_step_s() <= target * (1 + 1e-9)
        and state.classes["infer"].fits()
    )
    state.restore(solution.assignments)
    assert solution.status == "optimal"
    assert solution.variance == pytest.approx(least, rel=1e-6)
    assert solution.bound <= least * (1 + 1e-6)


@pytest.mark.parametrize(("bytes_per_s", "cap", "slack"), [(3e7, 3000, 0.02), (1e8, 3000, 0.1)])
def test_brute_force_finds_nothing_better_where_an_all_reduce_takes_nearly_all_compute(
    bytes_per_s, cap, slack
):
    graph = mlp(5)
    profiles = {
        name: replace(profile, reduce_s_per_byte=1 / bytes_per_s, reduce_s_per_call=1e-6)
        for name, profile in pair(graph).items()
    }
    cluster = cluster_of(link=Link(1e-6, bytes_per_s))
    problem = make_problem(graph, profiles, varied(graph, 0), cluster, Constraints(bucket_cap_bytes=cap))
    state = State(problem)
    fastest_start(state, "infer")
    assert_exact(state, state.step_s() * (1 + slack))


@settings(max_examples=25)
@given(st.data())
def test_bounds_hold_plans_hold_and_a_longer_step_never_costs_variance(data):
    graph = data.draw(graphs(max_ops=12))
    if not graph.adjustable:
        return
    profiles, cluster = pair(graph, data.draw(st.floats(1.2, 3.0))), cluster_of()
    sensitivity = varied(graph, data.draw(st.integers(0, 9)))
    before = None
    for slack in (0.01, 0.1, 0.4):
        plan = allocate(graph, profiles, sensitivity, cluster, slack=slack, time_limit_s=5)
        assert check_plan(graph, plan, profiles, sensitivity, cluster).ok
        assert plan.bound <= plan.added_variance * (1 + 1e-6)
        if before is not None and before.gap < 1e-6:
            assert plan.added_variance <= before.added_variance * (1 + 1e-6)
        before = plan


def test_the_plan_of_many_operators_is_near_its_bound():
    graph = encoder(12)
    profiles, sensitivity, cluster = pair(graph), varied(graph, 1), cluster_of(link=Link(1e-6, 1e9))
    plan = allocate(graph, profiles, sensitivity, cluster, slack=0.05)
    assert plan.gap <= 1e-3 and plan.status == "optimal"


def test_where_all_reduces_bind_the_bound_still_is_close():
    """Nothing that is lowered before the last bucket is ready saves its whole time: the rows know."""
    graph = encoder(6)
    for rate in (0.3, 0.6, 1.0):
        state, target = begun(graph, link=Link(1e-6, 1.5e8, rate), cap=40_000)
        assert sum(state.problem.exchange.durations_s) > 0.5 * target
        solution = milp.solve(state, ["infer"], target, time_limit_s=20)
        assert holds(state, target) and solution.gap < 1e-3


def test_no_program_is_given_more_time_than_is_left(monkeypatch):
    """Two classes, slow in other halves of the model, miss together the target that each reaches alone."""
    graph, now, given = mlp(6, width=64), [0.0], []
    early = {op.name for op in graph.ops[: len(graph.ops) // 2]}

    def slow(name: str, *, first: bool) -> Profile:
        profile = profile_of(graph, name, slow=1.6, latency_s=1e-8, cast_s=1e-11)
        other = profile_of(graph, name, slow=6.4)
        return replace(
            profile, ops={op: (other if (op in early) is first else profile).ops[op] for op in profile.ops}
        )

    profiles = {"train": profile_of(graph, "train"), "a": slow("a", first=True), "b": slow("b", first=False)}
    cluster = cluster_of(dict.fromkeys(profiles, 1), link=Link(1e-6, 3e7, 0.6))

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    def solve(self, *args, time_limit_s, **options):
        given.append(now[0] + time_limit_s)
        return real(self, *args, **options)

    real = IntegerProgram.solve
    monkeypatch.setattr(IntegerProgram, "solve", solve)
    monkeypatch.setattr(milp, "time", SimpleNamespace(perf_counter=tick))
    options = {"slack": 0.05, "bucket_cap_bytes": 5000, "time_limit_s": 30.0}
    allocate(graph, profiles, sensitivity_of(graph), cluster, **options)
    assert len(given) > 4 and max(given) <= 30.0 + 4.0  # a look at the clock takes a second


def test_memory_that_binds_is_kept_to():
    graph = encoder(3)
    state, target = begun(graph, slack=0.3, budget=0.5)
    known = state.variance
    solution = milp.solve(state, ["infer"], target, time_limit_s=10)
    assert holds(state, target) and solution.variance <= known
    assert state.classes["infer"].fits() and solution.bound <= solution.variance


@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_a_small_problem_whose_memory_binds_takes_few_programs(budget, monkeypatch):
    """Cut off one by one, its assignments took 80 programs, and the time limit came first."""
    programs, solve = [], IntegerProgram.solve
    monkeypatch.setattr(
        IntegerProgram, "solve", lambda *args, **options: programs.append(1) or solve(*args, **options)
    )
    state, target = begun(encoder(1), budget=budget, slack=0.1)
    solution = milp.solve(state, ["infer"], target, time_limit_s=600)
    assert solution.status == "optimal" and solution.gap <= 1e-6 and solution.variance > 0
    assert holds(state, target) and len(programs) <= 4


def test_what_is_saved_for_backward_raises_the_bound_where_memory_is_short(monkeypatch):
    bounds = []
    for saved in (memory_rows.saved_bytes, lambda *args: Sum()):
        monkeypatch.setattr(memory_rows, "saved_bytes", saved)
        state, target = begun(encoder(3, rows=512), budget=0.3, slack=9.0)
        bounds.append(
            milp._Class(state, "infer", target, ["infer"], state.variance)._solved(target, 20.0, 1e-3)[1]
        )
    assert bounds[0] > 0.01 and bounds[1] < 1e-6 * bounds[0]


def test_a_plan_says_why_it_is_not_proved_to_be_the_best(monkeypatch):
    graph = encoder(3, rows=512)
    parts = graph, pair(graph), varied(graph, 0), cluster_of()

    def status(**options):
        plan = allocate(*parts, **options)
        assert Plan.from_json(plan.to_json()) == plan
        return plan.status

    state, target = begun(graph, budget=0.3, slack=0.8)
    short = {"budgets": {"infer": state.classes["infer"].part.budget_bytes}, "target_s": target}
    assert status() == "optimal"
    assert status(**short, gap=0.99) == "optimal"
    solve = IntegerProgram.solve
    for code, said in ((1, "time-limited"), (4, "unsolved")):

        def stopped(self, *args, code=code, **options):
            result = solve(self, *args, **options)
            result.status = code
            return result

        monkeypatch.setattr(IntegerProgram, "solve", stopped)
        assert status(**short) == said


def test_where_no_program_is_solved_the_fastest_start_is_raised(monkeypatch):
    graph = encoder(3, rows=512)
    parts = graph, pair(graph), varied(graph, 0), cluster_of()
    nothing = SimpleNamespace(status=1, x=None, mip_dual_bound=None)
    monkeypatch.setattr(IntegerProgram, "solve", lambda *args, **options: nothing)
    state, target = begun(graph, slack=0.2)
    fastest = state.variance
    plan = allocate(*parts, target_s=target)
    assert check_plan(*parts[:1], plan, *parts[1:]).ok
    assert 0.0 < plan.added_variance < 0.5 * fastest and plan.status == "time-limited"


def test_few_free_operators_are_solved_exactly_however_many_are_pinned():
    graph = mlp(14)
    pins = {f"fc{layer}": "fp32" for layer in range(14) if layer % 3}
    state, target = begun(graph, slow=1.5, link=Link(0.0, 1e30), budget=0.4, pins=pins)
    solution = milp.solve(state, ["infer"], target)
    assert solution.status == "optimal" and solution.gap <= 1e-6 and solution.variance > 0


def test_a_plan_says_its_bound_and_forgets_it_when_pinned(tmp_path):
    graph = encoder(1)
    plan = allocate(graph, pair(graph), sensitivity_of(graph), cluster_of())
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert (again.bound, again.status, again.gap) == (plan.bound, plan.status, plan.gap)
    assert plan.pin("head", "fp32").bound is None and plan.pin("head", "fp32").gap is None


def test_with_everything_pinned_there_is_nothing_to_solve():
    graph = mlp(3)
    plan = allocate(
        graph,
        pair(graph),
        sensitivity_of(graph),
        cluster_of(),
        pins={"*": "bf16"},
        lower_all=True,
    )
    assert set(plan["infer"].assignment.values()) == {Precision.BF16}
    assert plan.gap == 0.0 and plan.added_variance > 0.0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gap": -0.1}, "gap"),
        ({"gap": float("nan")}, "gap"),
        ({"time_limit_s": 0.0}, "time limit"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, word):
    graph = encoder(1)
    with pytest.raises(FormatError, match=word):
        allocate(graph, pair(graph), sensitivity_of(graph), cluster_of(), **options)


def test_bits_of_bits():
    program = IntegerProgram()
    a, b = program.choice([1.0, 2.0])
    assert program.all_of([a, ONE]) is a and program.all_of([a, ZERO]) is ZERO
    assert program.any_of([ZERO, ZERO]).constant == 0.0 and program.any_of([a, ONE]).constant == 1.0
    c, _ = program.choice([0.0, 0.0])
    both, either = program.all_of([a, c]), program.any_of([a, c])
    for first, second in itertools.product((0.0, 1.0), repeat=2):
        for cost in (both, negated(both), either, negated(either)):
            found = program.solve(cost, also=[(a, first, first), (c, second, second)])
            assert both.at(found.x) == pytest.approx(first * second)
            assert either.at(found.x) == pytest.approx(max(first, second))
    assert program.solve().fun == pytest.approx(1.0)
    assert program.solve(also=[(b, 1.0, 1.0)]).fun == pytest.approx(2.0)


def test_every_point_of_the_frontier_is_a_plan_and_none_beats_another():
    graph = encoder(2)
    profiles, sensitivity, cluster = pair(graph), varied(graph, 2), cluster_of()
    plans = frontier(graph, profiles, sensitivity, cluster, 6)
    assert len(plans) > 3
    for plan in plans:
        assert check_plan(graph, plan, profiles, sensitivity, cluster).ok
    for one, other in itertools.pairwise(plans):
        assert one.step_s < other.step_s and one.added_variance > other.added_variance
    assert not any(entry.lowered for entry in plans[-1].classes.values())
    assert plans[0].step_s == allocate(graph, profiles, sensitivity, cluster).step_s


@pytest.mark.parametrize(("num", "options"), [(1, {}), (5, {"slack": 0.1}), (5, {"target_s": 1.0})])
def test_a_frontier_that_makes_no_sense_is_refused(num, options):
    graph = encoder(1)
    with pytest.raises(FormatError, match="frontier"):
        frontier(graph, pair(graph), sensitivity_of(graph), cluster_of(), num, **options)


def test_what_the_solver_prints_is_not_seen(capfd, monkeypatch):
    import ctypes

    import scipy.optimize

    solve, libc = scipy.optimize.milp, ctypes.CDLL(None)

    def talkative(*arguments, **options):
        libc.printf(b"debugging HiGHS\n")
        os.write(1, b"and more\n")
        return solve(*arguments, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talkative)
    program = IntegerProgram()
    program.choice([1.0, 2.0])
    assert program.solve().fun == 1.0
    print("seen")
    assert capfd.readouterr().out == "seen\n"


def three_classes(seed: int) -> tuple[State, float]:
    """Two classes to be lowered beside a fast one, one rank each; the last that computes pays more."""
    chance, graph = random.Random(seed), mlp(2)
    latency_s, bytes_per_s = 10 ** chance.uniform(-6, -4.5), 10 ** chance.uniform(7.5, 9.5)
    link = Link(latency_s, bytes_per_s, chance.choice([1.0, 0.5]), waiting_toll=2.0)

    def varied_profile(name: str, slow: float) -> Profile:
        found = profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=1e-11)
        ops = {
            op: {
                mode: Cost(*(seconds * 10 ** chance.uniform(-0.3, 0.3) for seconds in cost[:2]))
                for mode, cost in modes.items()
            }
            for op, modes in found.ops.items()
        }
        tolls = 10 ** chance.uniform(-7, -5), 10 ** chance.uniform(-10.5, -8.5)
        return replace(found, ops=ops, reduce_s_per_call=tolls[0], reduce_s_per_byte=tolls[1])

    slower = {"train": 1.0, "a": chance.uniform(1.5, 2.2), "b": chance.uniform(1.5, 2.2)}
    profiles = {name: varied_profile(name, slow) for name, slow in slower.items()}
    cluster = cluster_of(dict.fromkeys(slower, 1), link=link)
    given = Constraints(bucket_cap_bytes=4000)
    state = State(make_problem(graph, profiles, sensitivity_of(graph), cluster, given))
    for name in ("a", "b"):
        fastest_start(state, name)
    return state, state.step_s() * (1 + chance.uniform(0, 0.3))


@pytest.mark.parametrize("seed", [30, 45, 97])
def test_no_plan_of_several_lowered_classes_is_below_the_bound(seed):
    state, target = three_classes(seed)
    choices = {name: state.classes[name].part.choices for name in ("a", "b")}
    every = [itertools.product(*of.values()) for of in choices.values()]
    least = float("inf")
    for chosen in itertools.product(*every):
        for name, assignment in zip(choices, chosen, strict=True):
            state.move(name, dict(zip(choices[name], assignment, strict=True)))
        if holds(state, target):
            least = min(least, state.variance)
    state, target = three_classes(seed)
    solution = milp.solve(state, ["a", "b"], target, time_limit_s=60)
    assert solution.bound <= least * (1 + 1e-6) and holds(state, target)

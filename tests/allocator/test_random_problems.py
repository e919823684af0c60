"""Made-up problems: plans hold, what is called infeasible is, and both solvers keep to their bounds."""

from __future__ import annotations

import itertools
import math

import pytest
from random_problems import Drawn, problem

from qsync.allocator import allocate, check_plan
from qsync.allocator.solvers.precision_recovery import holds
from qsync.errors import InfeasibleError

SOLVERS = ("milp", "greedy")
PROBLEMS = range(30)
TIME_LIMIT_S = 1.0
# With more assignments than this, of all classes that may be lowered together, not every one is tried.
MOST_TRIED = 300
ROUNDING = 1e-6
# Where the exact solver proves nothing, greedy's plan may be better by this part.
UNPROVEN, STOPS = 0.05, 1e-3


def solved(drawn: Drawn) -> dict:
    """The plan of each solver, None where it calls the problem infeasible."""
    parts, found = (drawn.graph, drawn.profiles, drawn.sensitivity, drawn.cluster), {}
    for solver in SOLVERS:
        try:
            found[solver] = allocate(*parts, **drawn.options, solver=solver, time_limit_s=TIME_LIMIT_S)
        except InfeasibleError:
            found[solver] = None
    return found


def least_variance(drawn: Drawn, target_s: float | None) -> float | None:
    """The least variance of all assignments that hold, infinite if none does; None where they are too many.

    Without a target only memory can be missed. All classes but the strongest are lowered, if FP32 fits there.
    """
    state = drawn.state()
    strongest = min(state.classes, key=lambda name: state.classes[name].work.total_s)
    lowerable = [
        name for name, one in state.classes.items()
        if drawn.options.get("lower_all") or name != strongest or not one.fits()
    ]  # fmt: skip
    choices = {name: state.classes[name].part.choices for name in lowerable}
    many = math.prod(len(options) for of in choices.values() for options in of.values())
    if many > MOST_TRIED or drawn.options.get("margin"):
        return None
    least = math.inf
    for chosen in itertools.product(*(itertools.product(*of.values()) for of in choices.values())):
        for name, assignment in zip(choices, chosen, strict=True):
            state.move(name, dict(zip(choices[name], assignment, strict=True)))
        fits = all(one.fits() for one in state.classes.values())
        if fits and (target_s is None or holds(state, target_s)):
            least = min(least, state.variance)
    return least


@pytest.fixture(scope="module")
def plans():
    return {number: solved(problem(1, number)) for number in PROBLEMS}


def test_a_problem_is_a_function_of_its_number():
    assert problem(0, 3) == problem(0, 3) != problem(0, 4)
    assert len({len(problem(0, number).cluster.classes) for number in range(20)}) == 4


def test_every_plan_holds_in_a_full_replay(plans):
    for number, found in plans.items():
        drawn = problem(1, number)
        kept = {key: drawn.options.get(key) for key in ("budgets", "bucket_cap_bytes")}
        for solver, plan in found.items():
            if plan is not None:
                parts = (drawn.profiles, drawn.sensitivity, drawn.cluster)
                certificate = check_plan(drawn.graph, plan, *parts, **kept)
                assert certificate.ok, (number, solver, certificate.violations)


def test_the_solvers_agree_and_neither_bound_is_above_a_plan(plans):
    lowered = 0
    for number, found in plans.items():
        exact, quick = (found[solver] for solver in SOLVERS)
        assert (exact is None) == (quick is None), number
        if exact is not None and quick is not None:
            apart = min(max(exact.gap, STOPS), UNPROVEN)
            assert exact.added_variance <= quick.added_variance * (1 + apart + ROUNDING), number
            least = min(exact.added_variance, quick.added_variance)
            assert max(exact.bound, quick.bound) <= least * (1 + ROUNDING), number
            lowered += exact.added_variance > 0.0
    assert lowered > 10


def test_what_is_called_infeasible_is_and_no_bound_is_above_the_least_of_all(plans):
    tried = infeasible = 0
    for number, found in plans.items():
        drawn, exact = problem(1, number), found["milp"]
        least = least_variance(drawn, exact.target_s if exact else drawn.options.get("target_s"))
        if least is not None:
            tried += 1
            infeasible += exact is None
            assert math.isinf(least) == (exact is None), number
            if exact is not None:
                bound = max(found[solver].bound for solver in SOLVERS)
                assert bound <= least * (1 + ROUNDING), number
    assert tried > 4 and infeasible > 0

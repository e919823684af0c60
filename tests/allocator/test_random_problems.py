"""Made-up problems: plans hold, what is called infeasible is, and no bound is above a plan."""

from __future__ import annotations

import itertools
import math

import pytest
from random_problems import Drawn, problem

from qsync.allocator import allocate, check_plan
from qsync.allocator.solvers import milp
from qsync.allocator.solvers.precision_recovery import holds
from qsync.errors import InfeasibleError
from qsync.records.plans import Plan

PROBLEMS = range(30)
TIME_LIMIT_S = 1.0
# With more assignments than this, of all classes that may be lowered together, not every one is tried.
MOST_TRIED = 300
ROUNDING = 1e-6
# A plan may add more than the best of all by this part, and by its gap where nothing is proved.
STOPS = 1e-3


def solved(drawn: Drawn) -> Plan | None:
    """The plan of a problem, None where it is called infeasible."""
    parts = (drawn.graph, drawn.profiles, drawn.sensitivity, drawn.cluster)
    try:
        return allocate(*parts, **drawn.options, time_limit_s=TIME_LIMIT_S)
    except InfeasibleError:
        return None


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
    lowered = 0
    for number, plan in plans.items():
        if plan is not None:
            drawn = problem(1, number)
            certificate = check_plan(drawn.graph, plan, drawn.profiles, drawn.sensitivity, drawn.cluster)
            assert certificate.ok, (number, certificate.violations)
            assert plan.bound <= plan.added_variance * (1 + ROUNDING), number
            lowered += plan.added_variance > 0.0
    assert lowered > 10


def test_what_is_called_infeasible_is_and_plans_are_as_near_the_best_as_they_say(plans):
    tried = infeasible = 0
    for number, plan in plans.items():
        drawn = problem(1, number)
        least = least_variance(drawn, plan.target_s if plan else drawn.options.get("target_s"))
        if least is not None:
            tried += 1
            infeasible += plan is None
            assert math.isinf(least) == (plan is None), number
            if plan is not None:
                assert plan.bound <= least * (1 + ROUNDING), number
                assert plan.added_variance * (1 - max(plan.gap, STOPS)) <= least * (1 + ROUNDING), number
    assert tried > 4 and infeasible > 0


def test_where_nothing_is_proved_operators_are_exchanged(monkeypatch):
    drawn = problem(1, 103)
    parts = (drawn.graph, drawn.profiles, drawn.sensitivity, drawn.cluster)
    plan = allocate(*parts, **drawn.options)
    monkeypatch.setattr(milp, "repair", lambda *args: False)
    assert plan.added_variance < 0.8 * allocate(*parts, **drawn.options).added_variance

"""Where all assignments can be tried, the solver and the fastest start are exact."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from graphs import cluster_of, encoder, images, mlp, profile_of, sensitivity_of

from qsync.allocator import solvers
from qsync.allocator.constraints import Constraints
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import milp
from qsync.allocator.solvers.fastest_start import every_assignment, fastest_start, fastest_starts
from qsync.allocator.solvers.precision_recovery import holds
from qsync.errors import InfeasibleError
from qsync.records.profiles import Cost


def stated(graph, seed=0, budget=None):
    """A class whose costs and sensitivities vary by ten and by ten thousand times."""
    draw, sensitivity = Random(seed), sensitivity_of(graph)
    omega = {
        op: {p: v * 10 ** draw.uniform(-2, 2) for p, v in modes.items()}
        for op, modes in sensitivity.omega.items()
    }
    draw, profile = Random(seed + 100), profile_of(graph, slow=1.8, latency_s=1e-8, cast_s=1e-9)

    def varied(cost):
        return Cost(
            cost.forward_s * 10 ** draw.uniform(-0.5, 0.5), cost.backward_s * 10 ** draw.uniform(-0.5, 0.5)
        )

    ops = {op: {mode: varied(cost) for mode, cost in modes.items()} for op, modes in profile.ops.items()}
    parts = {"infer": replace(profile, ops=ops)}, replace(sensitivity, omega=omega), cluster_of({"infer": 2})
    return State(make_problem(graph, *parts, Constraints(budgets={"infer": budget} if budget else None)))


def tried(graph, seed, memory):
    """A budget so far between the least and the most memory, and (step, variance) of all that fits."""
    state = stated(graph, seed)
    one, found = state.classes["infer"], []
    for chosen in itertools.product(*one.part.choices.values()):
        state.move("infer", dict(zip(one.part.choices, chosen, strict=True)))
        found.append((one.peak_bytes, state.step_s(), one.variance))
    least, most = (f(entry[0] for entry in found) for f in (min, max))
    budget = int(least + memory * (most - least))
    return budget, [entry[1:] for entry in found if entry[0] <= budget]


@pytest.mark.parametrize("seed", [9, 15, 22])
def test_the_fastest_start_that_fits_is_the_fastest(seed):
    budget, fitting = tried(images(2), seed, 0.15)
    state = stated(images(2), seed, budget)
    fastest_start(state, "infer")
    assert state.classes["infer"].fits()
    assert state.step_s() == pytest.approx(min(step for step, _ in fitting))


@pytest.mark.parametrize(("seed", "time"), [(2, 0.8), (11, 0.2)])
def test_the_solver_finds_the_best_of_all(seed, time):
    budget, fitting = tried(images(2), seed, 0.1)
    state = stated(images(2), seed, budget)
    fastest_start(state, "infer")
    target = state.step_s() + time * (max(step for step, _ in fitting) - state.step_s())
    milp.solve(state, ["infer"], target)
    assert holds(state, target)
    assert state.variance == pytest.approx(
        min(added for step, added in fitting if step <= target * (1 + 1e-9))
    )


def test_only_classes_that_lengthen_the_step_are_brought_to_their_fastest(monkeypatch):
    graph, slow = encoder(1), {"train": 1.0, "first": 8.0, "second": 8.0, "faster": 1.2}
    profiles = {n: profile_of(graph, n, slow=s, latency_s=1e-8, cast_s=1e-9) for n, s in slow.items()}
    for name in ("first", "second"):  # no uniform assignment is their fastest
        costs = profiles[name].ops["layer.0.fc1"]
        late = {mode: Cost(1.1 * costs["fp32"].total_s) for mode in costs if mode.startswith("int8")}
        ops = {**profiles[name].ops, "layer.0.fc1": costs | late}
        profiles[name] = replace(profiles[name], ops=ops)
    cluster = cluster_of(dict.fromkeys(slow, 1))

    def started():
        return State(make_problem(graph, profiles, sensitivity_of(graph), cluster))

    expected, found, brought = started(), started(), []
    for name in ("first", "second", "faster"):
        fastest_start(expected, name)
    bring = solvers.fastest_start._from_uniform
    monkeypatch.setattr(
        solvers.fastest_start, "_from_uniform",
        lambda state, name, limit_s: brought.append(name) or bring(state, name, limit_s),
    )  # fmt: skip
    fastest_starts(found, ["faster", "first", "second"])
    assert found.step_s() == pytest.approx(expected.step_s())
    assert sorted(brought) == ["first", "second"]


def test_nothing_is_refused_that_fits():
    budget, fitting = tried(mlp(4), 0, 0.0)
    state = stated(mlp(4), 0, budget)
    fastest_start(state, "infer")
    assert fitting and state.classes["infer"].peak_bytes == budget
    with pytest.raises(InfeasibleError, match="bytes more"):
        fastest_start(stated(mlp(4), 0, budget - 1), "infer")


def test_too_many_are_not_tried():
    assert every_assignment(stated(mlp(8)), "infer") == []
    assert len(every_assignment(stated(mlp(3)), "infer")) == 27

"""Where all assignments can be tried, greedy and the fastest start are exact."""

from __future__ import annotations

import itertools

import pytest
from graphs import cluster_of, graphs, mlp, profile_of, sensitivity_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qsync.allocator.every import every_assignment
from qsync.allocator.fastest import fastest_start
from qsync.allocator.greedy import greedy
from qsync.allocator.problem import pose
from qsync.allocator.recovery import holds
from qsync.allocator.state import State
from qsync.cluster import Link
from qsync.errors import InfeasibleError


def stated(graph, budget=None):
    profiles = {
        name: profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=1e-9)
        for name, slow in (("train", 1.0), ("infer", 1.8))
    }
    budgets = {} if budget is None else {"infer": budget}
    cluster = cluster_of(link=Link(0.0, 1e30))
    return State(pose(graph, profiles, sensitivity_of(graph), cluster, budgets=budgets))


def tried(state):
    """(seconds, bytes, variance, assignment) of everything that there is."""
    one = state.classes["infer"]
    found, before = [], one.lowering.assignment()
    for chosen in itertools.product(*one.part.choices.values()):
        state.move("infer", dict(zip(one.part.choices, chosen, strict=True)))
        found.append((one.costs.total_s, one.peak_bytes, one.variance, one.lowering.assignment()))
    state.move("infer", before)
    return found


@settings(max_examples=40)
@given(graphs(max_ops=7), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_greedy_is_exact_where_few_may_be_chosen(graph, memory, time):
    assume(graph.adjustable)
    every = tried(stated(graph))
    assume(len(every) <= 1000)
    most, least = (f(entry[1] for entry in every) for f in (max, min))
    budget = int(least + memory * (most - least))
    fitting = [entry for entry in every if entry[1] <= budget]
    state = stated(graph, budget)
    fastest_start(state, "infer")
    one = state.classes["infer"]
    assert one.fits()
    slowest, fastest = (f(entry[0] for entry in fitting) for f in (max, min))
    assume(one.costs.total_s <= fastest + time * (slowest - fastest))
    beside = state.step_s() - one.costs.total_s
    target = max(state.step_s(), fastest + time * (slowest - fastest) + beside)
    greedy(state, ["infer"], target)
    assert holds(state, target)
    best = one.variance
    for _, _, variance, assignment in fitting:
        state.move("infer", assignment)
        assert not holds(state, target) or variance >= best * (1 - 1e-9)


def test_what_alone_fits_is_found_and_nothing_is_refused_that_fits():
    graph = mlp(4)
    every = tried(stated(graph))
    smallest = min(entry[1] for entry in every)
    state = stated(graph, smallest)
    fastest_start(state, "infer")
    assert state.classes["infer"].peak_bytes == smallest
    with pytest.raises(InfeasibleError, match="bytes more"):
        fastest_start(stated(graph, smallest - 1), "infer")


def test_too_many_are_not_tried():
    assert every_assignment(stated(mlp(8)), "infer") == []
    assert len(every_assignment(stated(mlp(3)), "infer")) == 27

"""Where single raises find no more, moves of windows do, and every plan they reach holds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qsync.allocator.problem import Constraints, make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import local_search, milp
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.greedy import greedy
from qsync.allocator.solvers.local_search import Changes, Round, combine, improve
from qsync.allocator.solvers.precision_recovery import holds


def begun(graph, seed, *, time=0.3, memory=None, cast_s=1e-9, pins=None, after_greedy=True):
    """After greedy, or at the fastest start; target and budget so far between what the fastest start uses
    and what FP32 does. Sensitivities vary by ten thousand times."""
    draw, sensitivity = Random(seed), sensitivity_of(graph)
    omega = {
        op: {p: v * 10 ** draw.uniform(-2, 2) for p, v in modes.items() if p != "fp32_fast"}
        for op, modes in sensitivity.omega.items()
    }
    profiles = {
        name: profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=cast_s)
        for name, slow in (("train", 1.0), ("infer", 1.8))
    }
    parts = graph, profiles, replace(sensitivity, omega=omega), cluster_of()
    state, budgets = State(make_problem(*parts, Constraints(pins=pins))), {}
    slow_s, most = state.step_s(), state.classes["infer"].peak_bytes
    fastest_start(state, "infer")
    target = state.step_s() + time * (slow_s - state.step_s())
    if memory is not None:
        least = state.classes["infer"].peak_bytes
        budgets = {"infer": int(least + memory * (most - least))}
        state = State(make_problem(*parts, Constraints(budgets=budgets)))
        fastest_start(state, "infer")
    if after_greedy:
        greedy(state, ["infer"], target)
    return state, target


def least_of(state, target):
    """Of every assignment there is."""
    one = state.classes["infer"]
    choices, variance = one.part.choices, one.part.variance
    every = [
        (sum(variance[op][p] for op, p in zip(choices, chosen, strict=True)), number, chosen)
        for number, chosen in enumerate(itertools.product(*choices.values()))
    ]
    for _, _, chosen in sorted(every):
        move = state.move("infer", dict(zip(choices, chosen, strict=True)))
        if holds(state, target):
            return state.variance
        state.back(move)
    raise AssertionError


@pytest.mark.parametrize("seed", [3, 16])
def test_local_search_comes_near_the_best_of_all_from_where_greedy_stops(seed):
    state, target = begun(mlp(8, rows=512), seed)
    alone = state.variance
    assert improve(state, ["infer"], target)
    assert holds(state, target)
    found = state.variance
    best = least_of(state, target)
    assert alone > 1.05 * best
    assert best * (1 - 1e-9) <= found <= 1.01 * best


def test_a_plan_far_above_its_bound_is_improved():
    state, target = begun(encoder(2, rows=512), 16, cast_s=1e-10)
    alone, assignments = state.variance, state.assignments()
    assert milp.improve_and_bound(state, ["infer"], target).variance < alone / 1.05
    state.restore(assignments)
    assert not improve(state, ["infer"], target, enough=alone)
    assert state.assignments() == assignments


@pytest.mark.parametrize("solve", [milp.solve, milp.improve_and_bound])
def test_a_plan_within_two_per_cent_of_its_bound_is_near_enough(monkeypatch, solve):
    state, target = begun(encoder(1, rows=512), 16, cast_s=1e-10)
    enough = []
    monkeypatch.setattr(milp, "improve", lambda *args, **options: enough.append(options["enough"]))
    found = solve(state, ["infer"], target)
    assert enough[0] == pytest.approx(found.bound / 0.98) and found.bound > 0.0


@pytest.mark.parametrize("memory", [None, 0.2])
def test_an_exchange_holds_and_lessens_the_variance_or_leaves_all_as_it_was(memory):
    made = 0
    for seed in range(12):
        state, target = begun(encoder(1, rows=512), seed, memory=memory, time=0.5)
        one, before, assignment = state.classes["infer"], state.variance, state.assignments()["infer"]
        single = [ops[:1] for ops in local_search._neighbours(one)]
        search = Round(state, "infer", single, target, memory is not None)
        if search.exchange():
            made += 1
            assert state.variance < before * (1 - 1e-3)
        changed = {op for op, precision in assignment.items() if one.precision(op) is not precision}
        assert changed == search.touched and holds(state, target)
    assert made >= 1


def test_moves_keep_within_a_memory_budget():
    state, target = begun(encoder(1, rows=512), 5, time=0.6, memory=0.2)
    alone = state.variance
    assert improve(state, ["infer"], target)
    assert holds(state, target)
    assert state.variance < alone / 1.3


def test_bytes_count_where_memory_is_short(monkeypatch):
    begin = Round.__init__
    found = {}
    for counts_bytes in (True, False):
        monkeypatch.setattr(Round, "__init__", lambda *args, c=counts_bytes: begin(*args[:-1], c))
        state, target = begun(encoder(1, rows=512), 8, time=0.6, memory=0.2, after_greedy=False)
        improve(state, ["infer"], target)
        assert holds(state, target)
        found[counts_bytes] = state.variance
    assert found[False] > 1.05 * found[True]


def test_a_move_of_one_window_fits_in_memory(monkeypatch):
    state, target = begun(mlp(6, rows=512), 5, time=1.0, memory=0.4, after_greedy=False)
    one = state.classes["infer"]
    assert one.is_tight

    def fitting():
        found = Round(state, "infer", list(local_search._neighbours(one)), target, True)
        for _, chosen in found.moves():
            if len(chosen) == 1:
                move = state.move("infer", dict(found.changes[chosen[0]].assignment))
                yield one.fits()
                state.back(move)

    assert set(fitting()) == {True}
    monkeypatch.setattr(type(one), "in_use", lambda self: np.zeros(1, dtype=np.int64))
    assert set(fitting()) == {True, False}


def test_where_memory_binds_changes_that_save_bytes_alone_stay():
    state, target = begun(mlp(6, rows=512), 5, time=1.0, memory=0.4, after_greedy=False)
    neighbours = list(local_search._neighbours(state.classes["infer"]))
    found = Round(state, "infer", neighbours, target, True)

    def beaten(window):
        """Changes that another of the same window beats in variance and seconds, and that save bytes."""
        priced = found.priced(window)
        for one in priced:
            if any(c.variance <= one.variance and c.seconds < one.seconds for c in priced):
                yield int(one.in_use.min()) < 0

    assert any(any(beaten(window)) for window in found.windows(neighbours))


def test_bytes_in_use_at_each_time_are_those_of_that_time():
    state, _ = begun(encoder(1), 0, memory=0.5)
    one = state.classes["infer"]
    assert one.in_use().tolist() == [one.bytes_at(when)[1] for when in range(len(one.in_use()))]
    assert one.in_use().max() == one.peak_bytes


def test_what_is_priced_in_a_round_does_not_grow_with_the_graph(monkeypatch):
    monkeypatch.setattr(local_search, "_MAX_PRICED_PER_CLASS", 300)
    monkeypatch.setattr(local_search, "_MAX_ROUNDS", 1)
    monkeypatch.setattr(local_search, "_WINDOW_SIZES", (8,))
    monkeypatch.setattr(Round, "exchange", lambda self: False)  # it replays, and prices nothing
    priced = []
    seconds = Round.seconds
    monkeypatch.setattr(Round, "seconds", lambda self: priced.append(1) or seconds(self))
    for layers in (2, 6):
        state, target = begun(encoder(layers, rows=512), 16, cast_s=1e-10)
        priced.clear()
        improve(state, ["infer"], target)
        assert 0 < len(priced) < 300 + 2 * 8 * layers


def test_with_nothing_to_choose_nothing_changes():
    state, target = begun(mlp(3), 0, pins={"*": "bf16"}, time=1.0)
    assert state.variance > 0.0
    assert not improve(state, ["infer"], target)


def changes(of, variance, uses):
    return Changes(np.array(of, dtype=bool), np.array(variance), np.array(uses))


def test_the_last_compensating_change_covers_the_remaining_deficit():
    found = changes(np.eye(4), [-5.0, 1.0, 1.5, 3.0], [[10.0], [-4.0], [-8.0], [-20.0]])
    assert combine(found, np.array([2.0]), 0.0)[0] == (-3.5, (0, 2))
    assert combine(found, np.array([0.0]), 0.0)[0] == (-2.5, (0, 1, 2))
    assert combine(found, np.array([10.0]), 0.0)[0] == (-5.0, (0,))
    assert combine(found, np.array([-30.0]), 0.0) == []
    assert combine(found, np.array([0.0]), 2.5) == []


def test_no_operator_is_changed_twice():
    overlapping = changes([[1, 1], [0, 1]], [-5.0, 1.0], [[1.0], [-1.0]])
    assert combine(overlapping, np.zeros(1), 0.0) == []


number = st.integers(-8, 8).map(float)


@given(
    of=arrays(bool, (6, 4)),
    variance=arrays(float, 6, elements=number),
    uses=arrays(float, (6, 2), elements=number),
    slack=arrays(float, 2, elements=number),
)
def test_every_combined_move_is_within_the_slack_and_lessens_the_variance(of, variance, uses, slack):
    variance.sort()
    for more, rows in combine(Changes(of, variance, uses), slack, 0.5):
        chosen = list(rows)
        assert more == variance[chosen].sum() < -0.5
        assert (uses[chosen].sum(axis=0) <= slack).all()
        assert (of[chosen].sum(axis=0) <= 1).all()

"""Places: of operators that find the same around themselves one is asked, and the answer holds for all."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from graphs import Builder, assignments_for, cluster_of, encoder, graphs, profile_of, sensitivity_of
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.allocator.problem import Constraints, make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import milp
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.precision_recovery import holds
from qsync.lowering.incremental import lower
from qsync.predictor.memory.peak import peak_memory
from qsync.records.cluster import Link
from qsync.records.precision import Precision
from qsync.records.profiles import Cost
from qsync.replayer import least_time, starts_s

BF16, INT8 = Precision.BF16, Precision.INT8


def posed(graph, profile=None, names=("infer",)):
    """Which precision adds most differs from operator to operator."""
    profiles = {name: profile or profile_of(graph, name, cast_s=1e-11) for name in names}
    profiles = {name: replace(one, device_class=name) for name, one in profiles.items()}
    draw, found = Random(0), sensitivity_of(graph)
    omega = {op: {p: draw.random() for p in modes} for op, modes in found.omega.items()}
    sensitivity = replace(found, omega=omega)
    return make_problem(graph, profiles, sensitivity, cluster_of(dict.fromkeys(names, 1)))


def places(graph, profile=None):
    return State(posed(graph, profile)).classes["infer"].structural_classes()


def test_equal_blocks_have_equal_places_but_for_those_near_the_ends():
    few, many = places(encoder(12)), places(encoder(24))
    assert len(set(many.values())) == len(set(few.values())) < len(few)
    for op in ("query", "out", "fc1"):
        assert many[f"layer.11.{op}"] == many[f"layer.12.{op}"] != many["layer.0." + op]
    assert len({many[f"layer.11.{op}"] for op in ("query", "attention", "out", "fc1", "fc2")}) == 5


def test_what_costs_otherwise_is_another_place_and_so_is_what_is_beside_it():
    graph = encoder(24)
    profile = profile_of(graph, cast_s=1e-11)
    ops = {**profile.ops, "layer.12.fc1": {**profile.ops["layer.12.fc1"], "int8": Cost(1.0)}}
    found = places(graph, replace(profile, ops=ops))
    assert found["layer.12.fc1"] != found["layer.11.fc1"]
    assert found["layer.12.fc2"] != found["layer.11.fc2"]
    dear = replace(profile, casts={("layer.12.gelu", "fp32", "int8_row"): Cost(1.0)})
    assert places(graph, dear)["layer.12.fc2"] != found["layer.11.fc2"]


def test_another_precision_is_another_place():
    one = State(posed(encoder(24)))
    before = one.classes["infer"].structural_classes()
    move = one.move("infer", {"layer.12.fc1": BF16})
    after = one.classes["infer"].structural_classes()
    assert after["layer.12.fc1"] != before["layer.12.fc1"] and after["layer.12.fc2"] != before["layer.12.fc2"]
    assert after["layer.2.fc1"] == before["layer.2.fc1"]
    one.back(move)
    assert one.classes["infer"].structural_classes() == before


@given(st.data())
def test_what_is_known_of_a_place_holds_there(data):
    graph = data.draw(graphs())
    assume(graph.adjustable)
    state = State(posed(graph))
    one = state.classes["infer"]
    choices = one.part.choices
    for _ in range(2):  # what was found before the second assignment is remembered
        drawn = data.draw(assignments_for(graph, (Precision.FP32, BF16, INT8)))
        state.move("infer", {op: p for op, p in drawn.items() if p in choices[op]})
        now = one.structural_classes()
        for op, options in choices.items():
            for precision in options:
                known = state.seconds_of("infer", {op: precision}, now)
                before = one.costs.total_s
                move = state.move("infer", {op: precision})
                assert known == pytest.approx(one.costs.total_s - before, abs=1e-15)
                state.back(move)


def test_equal_blocks_are_asked_about_once():
    def asked(num_layers):
        state = State(posed(encoder(num_layers)))
        one = state.classes["infer"]
        now = one.structural_classes()
        for op, options in one.part.choices.items():
            for precision in options:
                state.seconds_of("infer", {op: precision}, now)
        return len(one.known_s)

    assert asked(40) == asked(20) < 40 * 6


def test_the_fastest_start_of_equal_blocks_is_found_in_as_many_moves_as_that_of_few(monkeypatch):
    count = 0
    move = State.move

    def counted(self, device_class, assignment):
        nonlocal count
        count += 1
        return move(self, device_class, assignment)

    monkeypatch.setattr(State, "move", counted)
    found = []
    for num_layers in (20, 40):
        state, count = State(posed(encoder(num_layers))), 0
        fastest_start(state, "infer")
        found.append(count)
        # Nothing alone makes it faster.
        one = state.classes["infer"]
        now = one.structural_classes()
        for op, options in one.part.choices.items():
            assert all(state.seconds_of("infer", {op: p}, now) > -1e-12 for p in options)
    assert found[0] == found[1]


def test_memory_after_many_changes_is_that_of_the_whole_graph():
    graph = encoder(24)
    state = State(posed(graph))
    one = state.classes["infer"]
    highest = one.peak_bytes
    move = state.move("infer", dict.fromkeys(one.part.choices, INT8))
    assert sum(len(change.touched) for change in move.changes) > 200
    assert one.peak_bytes == peak_memory(lower(graph, one.lowering.assignment()), num_ranks=1).peak_bytes
    assert one.memory().peak_bytes == one.peak_bytes != highest
    state.back(move)
    assert one.peak_bytes == highest


def test_classes_that_begin_alike_then_go_their_own_ways():
    graph = encoder(2)
    state = State(posed(graph, names=("train", "infer")))
    train, infer = (state.classes[name] for name in ("train", "infer"))
    before = train.peak_bytes, train.lowering.lowered(), train.costs.total_s
    state.move("infer", dict.fromkeys(infer.part.choices, INT8))
    assert infer.peak_bytes != before[0]
    assert (train.peak_bytes, train.lowering.lowered(), train.costs.total_s) == before
    lowered = lower(graph, infer.lowering.assignment())
    assert infer.lowering.lowered() == lowered
    assert infer.memory() == peak_memory(lowered, num_ranks=2)


def test_where_buffers_are_handed_out_first_all_start_with_the_last():
    builder = Builder("buffered")
    builder.enter("running_mean", (64,), "buffer")
    x = builder.enter("x", (16, 32))
    for layer in range(3):
        x = builder.linear(f"fc{layer}", x, 32)
    builder.loss("loss", x)
    graph = builder.build()
    profiles = {"train": profile_of(graph, "train", slow=0.1, optimizer_s=1e-2), "infer": profile_of(graph)}
    state = State(make_problem(graph, profiles, sensitivity_of(graph), cluster_of(link=Link(1e-6, 1e9))))
    exchange, works = state.problem.exchange, [one.work for one in state.classes.values()]
    starts = starts_s(works, exchange)
    assert starts[0] == starts[1] == 1e-2 + exchange.broadcast_s > works[1].optimizer_s
    assert least_time(works[1], starts[1], exchange) == pytest.approx(state.step_s())
    # The exact solver's rows know it: nothing that they allow is refused.
    slowest_s = state.step_s()
    fastest_start(state, "infer")
    target = state.step_s() + 0.4 * (slowest_s - state.step_s())
    solution = milp.solve(state, ["infer"], target)
    assert solution.gap <= 1e-4 and holds(state, target)
    part = milp._Class(state, "infer", target, ["infer"])
    found, _ = part._solved(target, 5.0, 0.0)
    state.move("infer", found)
    assert holds(state, target)


@given(st.data(), st.sampled_from([Link(1e-6, 1e9), Link(1e-5, 1e6), Link(1e-6, 1e8, 0.6), Link(1e-7, 1e10)]))
def test_no_step_is_shorter_than_one_class_needs(data, link):
    graph = data.draw(graphs())
    assume(graph.adjustable)
    profiles = {n: profile_of(graph, n, slow=s, cast_s=1e-11) for n, s in (("train", 1.0), ("infer", 1.8))}
    problem = make_problem(
        graph, profiles, sensitivity_of(graph), cluster_of(link=link), Constraints(bucket_cap_bytes=64)
    )
    state = State(problem)
    drawn = data.draw(assignments_for(graph, (Precision.FP32, BF16, INT8)))
    state.move("infer", {op: p for op, p in drawn.items() if p in problem.classes["infer"].choices[op]})
    works = [one.work for one in state.classes.values()]
    starts = starts_s(works, problem.exchange)
    least = max(least_time(work, start, problem.exchange) for work, start in zip(works, starts, strict=True))
    assert least <= state.step_s() * (1 + 1e-9)
    assert least >= max(one.work.total_s for one in state.classes.values()) * (1 - 1e-9)

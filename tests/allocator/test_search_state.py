"""The state of a search: memory after many changes, classes that begin alike, and when each class starts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from graphs import Builder, cluster_of, encoder, profile_of, sensitivity_of

from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import milp
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.precision_recovery import holds
from qsync.lowering.incremental import lower
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import peak_memory
from qsync.records.cluster import Link
from qsync.replayer import starts_s

INT8 = Precision.INT8


def posed(graph, profile=None, names=("infer",)):
    """Which precision adds most differs from operator to operator."""
    profiles = {name: profile or profile_of(graph, name, cast_s=1e-11) for name in names}
    profiles = {name: replace(one, device_class=name) for name, one in profiles.items()}
    draw, found = Random(0), sensitivity_of(graph)
    omega = {op: {p: draw.random() for p in modes} for op, modes in found.omega.items()}
    sensitivity = replace(found, omega=omega)
    return make_problem(graph, profiles, sensitivity, cluster_of(dict.fromkeys(names, 1)))


def test_memory_after_many_changes_is_that_of_the_whole_graph():
    graph = encoder(24)
    state = State(posed(graph))
    one = state.classes["infer"]
    highest = one.peak_bytes
    move = state.move("infer", dict.fromkeys(one.part.choices, INT8))
    assert len(move.change.touched) > 200
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
    # The exact solver's rows know it: nothing that they allow is refused.
    slowest_s = state.step_s()
    fastest_start(state, "infer")
    target = state.step_s() + 0.4 * (slowest_s - state.step_s())
    solution = milp.solve(state, ["infer"], target)
    assert solution.gap <= 1e-4 and holds(state, target)
    part = milp._Class(state, "infer", target, ["infer"], state.variance)
    point, _ = part._solved(target, 5.0, 0.0)
    state.move("infer", part._candidate(point)[0])
    assert holds(state, target)

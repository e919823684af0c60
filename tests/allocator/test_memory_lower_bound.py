"""What is certainly kept for backward: never more than the memory model says, and most of it."""

from __future__ import annotations

import random

import pytest
from graphs import CPU_PRECISIONS, assignments_for, cluster_of, encoder, graphs, images, mlp, profile_of
from graphs import sensitivity_of as sensitivity
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.memory_lower_bound import saved_bytes
from qsync.allocator.solvers.milp_expressions import Sum
from qsync.predictor.memory.peak import StepMemory, bytes_throughout


def state_of(graph):
    return State(
        make_problem(graph, {"infer": profile_of(graph)}, sensitivity(graph), cluster_of({"infer": 2}))
    )


def kept_and_in_use(state, assignment):
    """The sum at an assignment, and what the memory model says is in use when backward begins."""
    one, graph = state.classes["infer"], state.problem.graph
    linear = ClassModel(graph, one.part, 1.0, float("inf"))
    kept = saved_bytes(linear, graph, "cpu")
    state.move("infer", assignment)
    fixed = [
        (linear.chosen[op][p], 1.0, 1.0) for op, p in assignment.items() if not linear.chosen[op][p].settled
    ]
    scaled = Sum()
    scaled.add(kept, 1e-3)
    least = scaled.constant
    if linear.program.num_columns:
        found = linear.program.solve(scaled, also=fixed)
        least += -float("inf") if found.x is None else found.fun  # some cast may have no price
    step = StepMemory(one.lowering.lowered(), num_ranks=2)
    curve = step.curve()
    when = len(graph.ops)
    waiting = curve["casts"][when] + curve["saved"][when]
    assert curve["throughout"][0] == bytes_throughout(graph)
    return 1e3 * least, waiting, waiting + curve["transient"][when]


@given(st.data())
def test_never_more_than_is_in_use(data):
    graph = data.draw(graphs())
    assume(graph.adjustable)
    state = state_of(graph)
    choices = state.classes["infer"].part.choices
    drawn = data.draw(assignments_for(graph, CPU_PRECISIONS))
    kept, _, in_use = kept_and_in_use(state, {op: p for op, p in drawn.items() if p in choices[op]})
    assume(kept > -float("inf"))
    assert kept <= in_use + 1e-3


@pytest.mark.parametrize(
    ("graph", "part"), [(encoder(2), 1.0), (mlp(4), 1.0), (images(2), 0.9)], ids=["encoder", "mlp", "images"]
)
def test_what_is_saved_and_cast_is_counted(graph, part):
    """To the byte, but for windows of images that a convolution packs."""
    draw, state = random.Random(0), state_of(graph)
    for _ in range(6):
        drawn = {op: draw.choice(options) for op, options in state.classes["infer"].part.choices.items()}
        kept, waiting, _ = kept_and_in_use(state, drawn)
        assert part * waiting - 1.0 <= kept <= waiting + 1.0

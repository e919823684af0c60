"""Lowering an assignment by tables: the same graph as operator by operator, and few questions to the rule."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from graphs import Builder, assignments_for, encoder, graphs, images, mlp
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.errors import FormatError, MismatchError
from qsync.lowering import cast_rules, vectorized
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.numbering import Numbered
from qsync.lowering.vectorized import Tabulated, tables
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.graph import OpGraph
from qsync.records.save_less import can_save_less, ops_that_save_less


def drawn(graph: OpGraph, seed: int) -> dict[str, Precision]:
    """A random assignment."""
    rng = random.Random(seed)
    return {op.name: rng.choice(PRECISIONS_BY_KIND[op.kind]) for op in graph.adjustable}


def many_operands(builder: Builder, x: str) -> str:
    """More float operands than fit into one key, some of which are lowered."""
    parts = [builder.linear(f"part{j}", x, 8) for j in range(15)]
    return builder.follow("all", "cat", *parts)


@given(graphs(), st.data())
def test_tables_lower_as_the_rule_does_operator_by_operator(graph, data):
    assume(graph.adjustable)
    for _ in range(2):  # the second time from tables that know the graph
        assignment = data.draw(assignments_for(graph))
        narrow = data.draw(st.sampled_from(["bf16", None]))
        able = [op.name for op in graph.ops if can_save_less(op)]
        less = data.draw(st.sets(st.sampled_from(able))) if able else set()
        expected = lower(graph, assignment, narrow, less)
        assert Tabulated(graph, assignment, narrow, less).lowered() == expected


@pytest.mark.parametrize("graph", [mlp(3), encoder(2), images(3)], ids=["mlp", "encoder", "images"])
@pytest.mark.parametrize("saving_less", [(), ("*",)], ids=["plain", "saving less"])
def test_tables_lower_blocks_as_the_rule_does(graph, saving_less):
    less = ops_that_save_less(graph, saving_less)
    for seed in range(10):
        assignment = drawn(graph, seed)
        assert Tabulated(graph, assignment, "bf16", less).lowered() == lower(graph, assignment, "bf16", less)


def test_more_operands_than_one_key_holds_are_told_apart():
    builder = Builder()
    builder.loss("loss", many_operands(builder, builder.enter("x", (4, 8))))
    graph = builder.build()
    for j in (0, 7, 14):
        # Only if all fifteen are narrow is the sum of them: each operand must count.
        assignment = {f"part{k}": Precision.FP32 if k == j else Precision.BF16 for k in range(15)}
        assert Tabulated(graph, assignment).lowered() == lower(graph, assignment)
    assignment = {f"part{k}": Precision.BF16 for k in range(15)}
    assert Tabulated(graph, assignment).lowered() == lower(graph, assignment)


def test_an_operator_without_operands_is_no_other_s_neighbour():
    """Numbers of neighbourhoods with and without operands must not meet."""
    builder = Builder()
    x = builder.enter("x", (4, 8))
    builder.loss("loss", builder.linear("fc", x, 8))
    for j in range(200):
        builder.op(f"made{j}", "other", Role.FIXED, [], (j + 1,))
    graph = builder.build()
    assert Tabulated(graph, {}).lowered() == lower(graph, {})


def test_the_rule_is_asked_once_for_every_distinct_neighbourhood(monkeypatch):
    asked = []
    for name in ("mode_of", "needed_casts", "run_form_of"):
        real = getattr(cast_rules, name)
        monkeypatch.setattr(
            cast_rules, name, lambda *args, name=name, real=real: (asked.append(name), real(*args))[1]
        )
    counts = []
    for num_layers in (2, 4, 8):
        graph = encoder(num_layers)
        assignment = {op.name: Precision.INT8 for op in graph.adjustable}
        asked.clear()
        found = Tabulated(graph, assignment)
        assert asked
        counts.append(len(asked))
        asked.clear()
        assert np.array_equal(Tabulated(graph, assignment).neighbourhood, found.neighbourhood)
        assert not asked
    assert counts[0] == counts[1] == counts[2]


def test_tables_are_forgotten_with_their_graph():
    import gc

    graph = encoder(1)
    Tabulated(graph, {})
    known = len(vectorized._TABLES._held)
    del graph
    gc.collect()
    assert len(vectorized._TABLES._held) < known


def test_what_cannot_be_lowered_is_refused_as_the_rule_refuses_it():
    graph = encoder(1)
    with pytest.raises(MismatchError, match="no adjustable operator 'nothing'"):
        Tabulated(graph, {"nothing": Precision.BF16})
    with pytest.raises(FormatError, match=r"\(attention\) has no fp8 kernel"):
        Tabulated(graph, {"layer.0.attention": Precision.FP8})
    with pytest.raises(MismatchError, match="no operator 'head' that can save less"):
        Tabulated(graph, {}, saving_less=["head"])


def test_types_that_no_assignment_changes_are_settled_once():
    graph = encoder(1)
    wider = replace(graph, ops=tuple(replace(op, magnitude=1e39) for op in graph.ops))
    for one in (graph, wider):
        assignment = drawn(one, 0)
        assert Tabulated(one, assignment).lowered() == Lowering(one, assignment).lowered()
    assert tables(graph) is not tables(wider)


def test_numbers_stay_what_they_were():
    numbered = Numbered()
    first, fresh = numbered(np.array([7, 3, 7]))
    assert fresh == [1, 0] and list(first) == [1, 0, 1]
    second, fresh = numbered(np.array([3, 9, 7, 1, 9]))
    assert [second[0], second[2]] == [first[1], first[0]] and len(numbered) == 4
    assert sorted(second) == [0, 1, 2, 3, 3] and sorted(fresh) == [1, 3]

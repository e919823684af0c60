"""The table of a graph: the rows that the rules give operator by operator, and few questions to the rules."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from graphs import Builder, encoder, images, mlp
from reference_lowering import reference_lowering

from qsync.lowering import cast_rules, table
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.numbering import Numbered
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.graph import OpGraph
from qsync.records.save_less import ops_that_save_less


def drawn(graph: OpGraph, seed: int) -> dict[str, Precision]:
    """A random assignment."""
    rng = random.Random(seed)
    return {op.name: rng.choice(PRECISIONS_BY_KIND[op.kind]) for op in graph.adjustable}


def many_operands(builder: Builder, x: str) -> str:
    """More float operands than fit into one key, some of which are lowered."""
    parts = [builder.linear(f"part{j}", x, 8) for j in range(15)]
    return builder.follow("all", "cat", *parts)


@pytest.mark.parametrize("graph", [mlp(3), encoder(2), images(3)], ids=["mlp", "encoder", "images"])
@pytest.mark.parametrize("saving_less", [(), ("*",)], ids=["plain", "saving less"])
def test_the_table_lowers_blocks_as_the_rules_do(graph, saving_less):
    less = ops_that_save_less(graph, saving_less)
    for seed in range(10):
        found = drawn(graph, seed), "bf16", less
        assert lower(graph, *found) == reference_lowering(graph, *found)


def test_more_operands_than_one_key_holds_are_told_apart():
    builder = Builder()
    builder.loss("loss", many_operands(builder, builder.enter("x", (4, 8))))
    graph = builder.build()
    for j in (0, 7, 14):
        # Only if all fifteen are narrow is the sum of them: each operand must count.
        assignment = {f"part{k}": Precision.FP32 if k == j else Precision.BF16 for k in range(15)}
        assert lower(graph, assignment) == reference_lowering(graph, assignment)
    assignment = {f"part{k}": Precision.BF16 for k in range(15)}
    assert lower(graph, assignment) == reference_lowering(graph, assignment)


def test_an_operator_without_operands_is_no_other_s_neighbour():
    """Numbers of neighbourhoods with and without operands must not meet."""
    builder = Builder()
    x = builder.enter("x", (4, 8))
    builder.loss("loss", builder.linear("fc", x, 8))
    for j in range(200):
        builder.op(f"made{j}", "other", Role.FIXED, [], (j + 1,))
    graph = builder.build()
    assert lower(graph, {}) == reference_lowering(graph, {})


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
        found = Lowering(graph, assignment)
        assert asked
        counts.append(len(asked))
        asked.clear()
        assert np.array_equal(Lowering(graph, assignment).row, found.row)
        assert not asked
    assert counts[0] == counts[1] == counts[2]


def test_tables_are_forgotten_with_their_graph():
    import gc

    graph = encoder(1)
    lower(graph, {})
    known = len(table._TABLES._held)
    del graph
    gc.collect()
    assert len(table._TABLES._held) < known


def test_types_that_no_assignment_changes_are_settled_once():
    graph = encoder(1)
    wider = replace(graph, ops=tuple(replace(op, magnitude=1e39) for op in graph.ops))
    for one in (graph, wider):
        assignment = drawn(one, 0)
        assert lower(one, assignment) == reference_lowering(one, assignment)
    assert table.table(graph) is not table.table(wider)


def test_numbers_stay_what_they_were():
    numbered = Numbered()
    first, fresh = numbered(np.array([7, 3, 7]))
    assert fresh == [1, 0] and list(first) == [1, 0, 1]
    second, fresh = numbered(np.array([3, 9, 7, 1, 9]))
    assert [second[0], second[2]] == [first[1], first[0]] and len(numbered) == 4
    assert sorted(second) == [0, 1, 2, 3, 3] and sorted(fresh) == [1, 3]

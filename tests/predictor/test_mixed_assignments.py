"""The mixed assignments that a profile is measured at show what uniform ones do not."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from graphs import mlp

import qsync
from qsync.experiments.workloads.gpt import Gpt
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.profiling.mixed_assignments import mixtures

CHOSEN = [Precision.FP32, Precision.BF16, Precision.INT8]


def casts(graph, assignment):
    nodes = lower(graph, assignment).nodes
    return {(n.value, n.source, n.target) for n in nodes if isinstance(n, Cast)}


def test_mixtures_show_casts_that_uniform_assignments_do_not():
    graph = mlp(8)
    uniform = set()
    for precision in CHOSEN:
        uniform |= casts(graph, {op.name: precision for op in graph.adjustable})
    mixed = set().union(*(casts(graph, mixture) for mixture in mixtures(graph, CHOSEN, 4)))
    assert len(mixed - uniform) >= len(graph.adjustable)


def test_a_cover_sees_more_than_the_first_draws_do():
    graph = mlp(12)

    def seen(chosen):
        return len(set().union(*(casts(graph, one) for one in chosen)))

    few = seen(mixtures(graph, CHOSEN, 3))
    assert few >= max(seen(mixtures(graph, CHOSEN, 1, seed=s) * 3) for s in range(3))
    assert mixtures(graph, CHOSEN, 3) == mixtures(graph, CHOSEN, 3)


def test_mixtures_of_a_small_graph_differ():
    graph = mlp(2)  # two of these mixtures show all that there is
    chosen = mixtures(graph, CHOSEN, 6)
    assert len({tuple(sorted(one.items())) for one in chosen}) == 6


def test_every_precision_given_is_one_that_the_kind_has():
    graph = mlp(4)
    for mixture in mixtures(graph, [Precision.FP32, Precision.FP8, Precision.INT8_ALL], 3):
        for op in graph.adjustable:
            assert mixture[op.name] in PRECISIONS_BY_KIND[op.kind]


@pytest.mark.parametrize("layers", [4, 6, 8])
def test_products_stand_beside_their_own_precision_and_beside_others_in_one_form(layers):
    """Only the difference of the two tells what a switch costs, and one product shows mostly noise."""
    graph = qsync.capture(Gpt(layers, 16, 2, 16, 50), torch.zeros(2, 16, dtype=torch.long))
    linear = {op.name for op in graph.ops if op.kind == "linear"}
    precisions = [*CHOSEN, Precision.INT8_ALL]
    uniform = [
        {op.name: p for op in graph.adjustable if p in PRECISIONS_BY_KIND[op.kind]} for p in precisions
    ]
    before, after = defaultdict(set), defaultdict(set)
    for assignment in [*uniform, *mixtures(graph, precisions, 2 * len(precisions))]:
        for node in lower(graph, assignment, "bf16").nodes:
            if isinstance(node, Run) and node.op in linear:
                before[node.mode, node.op, node.timed_as].add(node.before_other)
                after[node.mode, node.op, node.timed_as].add(node.after_other)
    for precision in precisions:
        for sides in (before, after):
            both = [key for key, ways in sides.items() if key[0] == precision and len(ways) == 2]
            assert len(both) >= 6, (precision, both)

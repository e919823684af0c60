"""The mixed assignments that a profile is measured at show what uniform ones do not."""

from __future__ import annotations

from graphs import mlp

from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast
from qsync.predictor.profiling.mixed_assignments import mixtures
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

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

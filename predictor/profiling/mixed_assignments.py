"""Which mixed assignments to time: few, that together show operators in the company they may get. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from qsync.lowering.rules import Cast, lower
from qsync.records.graph import OpGraph
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

NUM_CANDIDATES = 48
# Nodes lowered at most to find mixtures: on a graph of thousands of operators fewer candidates are tried.
MOST_NODES = 50_000

Assignment = dict[str, Precision]


def mixtures(graph: OpGraph, precisions: Sequence[Precision], num: int, seed: int = 0) -> list[Assignment]:
    """`num` assignments in which neighbours differ, chosen so that few ways of running stay unseen (ours).

    What an operator costs depends on its neighbours: which casts there are, in which type a following
    operator runs, in which order images lie. Of random assignments the one that shows most that uniform ones
    and those before it have not is taken, `num` times (greedy cover).

    >>> mixtures(graph, [Precision.FP32, Precision.BF16, Precision.INT8], num=3)
    """
    draw = random.Random(seed)
    narrow = "bf16" if Precision.BF16 in precisions else None
    usable = {op.name: [p for p in precisions if p in PRECISIONS_BY_KIND[op.kind]] for op in graph.adjustable}
    usable = {name: found for name, found in usable.items() if found}
    num_candidates = max(num, min(NUM_CANDIDATES, MOST_NODES // max(len(graph.ops), 1)))
    candidates = [{name: draw.choice(found) for name, found in usable.items()} for _ in range(num_candidates)]
    shown = [_shown(graph, candidate, narrow) for candidate in candidates]
    seen: set[tuple[str, ...]] = set()
    for precision in precisions:
        uniform = {name: precision for name, found in usable.items() if precision in found}
        seen |= _shown(graph, uniform, narrow)
    chosen: list[Assignment] = []
    for _ in range(num):
        best = max(range(num_candidates), key=lambda i: (len(shown[i] - seen), -i))
        chosen.append(candidates[best])
        seen |= shown[best]
    return chosen


def _shown(graph: OpGraph, assignment: Assignment, narrow: str | None) -> set[tuple[str, ...]]:
    """What a profile gets to see of a step under this assignment: its keys."""
    return {
        (node.value, node.taken_as, node.target) if isinstance(node, Cast) else (node.op, node.timed_as)
        for node in lower(graph, assignment, narrow).nodes
    }

"""The assignments that a round of a profile times: one per uniform precision, and mixtures of them. Pure.

An operator's cost depends on its neighbours: on the casts between them, on the type in which a following
operator runs, on the memory format of images. Mixtures show operators beside neighbours of other types.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast
from qsync.predictor.profiling.runner import Choose
from qsync.records.graph import OpGraph
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

NUM_CANDIDATES = 48
# Nodes lowered at most to find mixtures: a graph of thousands of operators gets fewer candidates.
MAX_LOWERED_NODES = 50_000
# Mixed steps timed for each uniform one.
MIXTURES_PER_PRECISION = 2

Assignment = dict[str, Precision]


class RoundStep(NamedTuple):
    """One step of a round: its label, its assignment, and whether operators save less for backward."""

    label: str
    choose: Choose
    saves_less: bool


def num_round_steps(num_precisions: int, save_less: bool = False) -> int:
    """Return the number of steps of a round: uniform ones, and mixtures if there are several precisions."""
    num = num_precisions * (1 + MIXTURES_PER_PRECISION) if num_precisions > 1 else num_precisions
    return 2 * num if save_less else num


def round_steps(
    precisions: Sequence[Precision],
    save_less: bool,
    unsupported: Callable[[OpGraph, Precision], Mapping[str, str]],
) -> list[RoundStep]:
    """List the steps of a round; with `save_less` list every step again, saving less for backward.

    An operator runs in FP32 where its kind lacks the precision or the device does not support it
    (`unsupported`).
    """
    num = num_round_steps(len(precisions)) - len(precisions)

    def supported(graph: OpGraph, wanted: Mapping[str, Precision]) -> Assignment:
        lacking = {precision: unsupported(graph, precision) for precision in set(wanted.values())}
        return {
            op.name: wanted[op.name]
            for op in graph.adjustable
            if op.name in wanted
            and wanted[op.name] in PRECISIONS_BY_KIND[op.kind]
            and op.name not in lacking[wanted[op.name]]
        }

    def uniform(precision: Precision) -> Choose:
        return lambda graph: supported(graph, {op.name: precision for op in graph.adjustable})

    made: dict[str, list[Assignment]] = {}

    def mixture(k: int) -> Choose:
        def choose(graph: OpGraph) -> Assignment:
            if graph.shapes_hash not in made:
                made[graph.shapes_hash] = mixtures(graph, precisions, num)
            return supported(graph, made[graph.shapes_hash][k])

        return choose

    plain = [RoundStep(str(precision), uniform(precision), False) for precision in precisions]
    plain += [RoundStep(f"mixture {k + 1}", mixture(k), False) for k in range(num)]
    less = [RoundStep(f"{step.label}, saving less", step.choose, True) for step in plain]
    return plain + less if save_less else plain


def mixtures(graph: OpGraph, precisions: Sequence[Precision], num: int, seed: int = 0) -> list[Assignment]:
    """Choose `num` mixed assignments that together show the most (operator, mode) pairs and casts.

    Greedy cover: draw random assignments, then `num` times take the assignment with most pairs and casts that
    neither a uniform assignment nor an assignment taken before shows. Among equals take the one whose pairs
    and casts were shown least: a small graph is covered soon, and more steps of one mixture show less than
    steps of several.

    >>> mixtures(graph, [Precision.FP32, Precision.BF16, Precision.INT8], num=3)
    """
    draw = random.Random(seed)
    float_16bit = "bf16" if Precision.BF16 in precisions else None
    usable = {op.name: [p for p in precisions if p in PRECISIONS_BY_KIND[op.kind]] for op in graph.adjustable}
    usable = {name: found for name, found in usable.items() if found}
    num_candidates = max(num, min(NUM_CANDIDATES, MAX_LOWERED_NODES // max(len(graph.ops), 1)))
    candidates = [{name: draw.choice(found) for name, found in usable.items()} for _ in range(num_candidates)]
    shown = [_shown(graph, candidate, float_16bit) for candidate in candidates]
    times: Counter[tuple[str, ...]] = Counter()
    for precision in precisions:
        uniform = {name: precision for name, found in usable.items() if precision in found}
        times.update(_shown(graph, uniform, float_16bit))

    def shows(i: int) -> tuple[int, float, int]:
        return len(shown[i] - times.keys()), -sum(times[key] for key in shown[i]) / max(len(shown[i]), 1), -i

    chosen: list[Assignment] = []
    for _ in range(num):
        best = max(range(num_candidates), key=shows)
        chosen.append(candidates[best])
        times.update(shown[best])
    return chosen


def _shown(graph: OpGraph, assignment: Assignment, float_16bit: str | None) -> set[tuple[str, ...]]:
    """Return the keys of a profile that a step under this assignment measures."""
    return {
        (node.value, node.taken_as, node.target) if isinstance(node, Cast) else (node.op, node.timed_as)
        for node in lower(graph, assignment, float_16bit).nodes
    }

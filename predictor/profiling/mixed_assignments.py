"""The assignments that a round of a profile times: one per uniform precision, and mixtures of them. Pure.

An operator's cost depends on its neighbours: on the casts between them, on the type in which a following
operator runs, on the memory format of images. Mixtures show operators beside neighbours of other types, and
in each form beside products of their own precision too: the difference is the price of a switch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast
from qsync.predictor.profiling.runner import Choose
from qsync.records.graph import OpGraph
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

NUM_CANDIDATES = 192
# Nodes lowered at most to find mixtures: a graph of thousands of operators gets fewer candidates.
MAX_LOWERED_NODES = 50_000
# Mixed steps timed for each uniform one.
MIXTURES_PER_PRECISION = 2
# With this probability an operator of every other candidate has the precision of the operator before it.
_STAYING = 0.75
# Products of a precision that shall be timed both beside their like and beside others, each way.
_PRODUCTS_FOR_A_PRICE = 6

Assignment = dict[str, Precision]


class _Beside(NamedTuple):
    """An operator, as a profile times it, after or before a product of its own or of another precision.

    `other` is False for what is no product.
    """

    op: str
    timed_as: str
    mode: str
    way: str
    other: bool


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
    """Choose `num` mixed assignments that together show the most of what a profile prices.

    That is (operator, mode) pairs, each beside products of its own precision and of another, and casts.

    Greedy cover: draw random assignments, then `num` times take the assignment that shows most of what
    neither a uniform assignment nor an assignment taken before shows. What shows the price of a switch comes
    first, until enough products do for each precision. Among equals take the one that shows what was shown
    least: a small graph is covered soon, and more steps of one mixture show less than steps of several. In
    every other draw neighbours often have one precision, as in plans.

    >>> mixtures(graph, [Precision.FP32, Precision.BF16, Precision.INT8], num=3)
    """
    draw = random.Random(seed)
    float_16bit = "bf16" if Precision.BF16 in precisions else None
    usable = {op.name: [p for p in precisions if p in PRECISIONS_BY_KIND[op.kind]] for op in graph.adjustable}
    usable = {name: found for name, found in usable.items() if found}
    num_candidates = max(num, min(NUM_CANDIDATES, MAX_LOWERED_NODES // max(len(graph.ops), 1)))
    candidates = [_drawn(usable, draw, _STAYING if k % 2 else 0.0) for k in range(num_candidates)]
    shown = [_shown(graph, candidate, float_16bit) for candidate in candidates]
    times: Counter[tuple[Hashable, ...]] = Counter()
    for precision in precisions:
        uniform = {name: precision for name, found in usable.items() if precision in found}
        times.update(_shown(graph, uniform, float_16bit))

    priced: Counter[tuple[Hashable, ...]] = Counter()

    def prices(new: set[tuple[Hashable, ...]]) -> Counter[tuple[Hashable, ...]]:
        """Count the products, by precision and way, that these keys show beside their like and others."""
        beside = (key for key in new if isinstance(key, _Beside))
        return Counter((key.mode, key.way) for key in beside if key._replace(other=not key.other) in times)

    def shows(i: int) -> tuple[int, int, float, int]:
        new = shown[i] - times.keys()
        scarce = sum(min(num, max(0, _PRODUCTS_FOR_A_PRICE - priced[of])) for of, num in prices(new).items())
        return scarce, len(new), -sum(times[key] for key in shown[i]) / max(len(shown[i]), 1), -i

    chosen: list[Assignment] = []
    for _ in range(num):
        best = max(range(num_candidates), key=shows)
        chosen.append(candidates[best])
        priced.update(prices(shown[best] - times.keys()))
        times.update(shown[best])
    return chosen


def _drawn(usable: Mapping[str, Sequence[Precision]], draw: random.Random, staying: float) -> Assignment:
    """Draw a precision for each operator, in order; with probability `staying` that of the one before."""
    drawn: Assignment = {}
    before: Precision | None = None
    for name, found in usable.items():
        stays = draw.random() < staying
        before = before if stays and before is not None and before in found else draw.choice(found)
        drawn[name] = before
    return drawn


def _shown(graph: OpGraph, assignment: Assignment, float_16bit: str | None) -> set[tuple[Hashable, ...]]:
    """Return what a step under this assignment shows: keys of a profile, and what products stand beside."""
    keys: set[tuple[Hashable, ...]] = set()
    for node in lower(graph, assignment, float_16bit).nodes:
        if isinstance(node, Cast):
            keys.add(node.profile_key)
        else:
            keys.add((node.op, node.timed_as))
            keys.add(_Beside(node.op, node.timed_as, node.mode, "after", node.after_other))
            keys.add(_Beside(node.op, node.timed_as, node.mode, "before", node.before_other))
    return keys

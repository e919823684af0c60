"""The assignments that a profiling round times: one per uniform precision, and mixtures. Pure.

An operator's cost depends on its neighbours: on the casts between them, on the type in which a following
operator runs, on the memory format of images. Mixtures time operators beside neighbours of other types. They
also time a form beside products of equal and of other precision; the difference is the price of a switch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.profiling.runner import Choose
from qsync.records.graph import OpGraph

NUM_CANDIDATES = 192
# The most nodes to lower in search of mixtures: a graph of thousands of operators gets fewer candidates.
MAX_LOWERED_NODES = 50_000
# Mixed steps per uniform step in a round.
MIXTURES_PER_PRECISION = 2
# Probability that an operator takes the precision of the operator before it, in every other candidate.
_STAYING = 0.75
# Wanted products per precision and direction that are timed beside both equal and other precisions.
_PRODUCTS_FOR_A_PRICE = 6

Assignment = dict[str, Precision]


class _Beside(NamedTuple):
    """A timed operator after or before (`way`) a product of the same or of another precision (`other`).

    `other` is False for operators that are not products.
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
    """Return the number of steps of a round: uniform steps, and mixtures of several precisions."""
    num = num_precisions * (1 + MIXTURES_PER_PRECISION) if num_precisions > 1 else num_precisions
    return 2 * num if save_less else num


def round_steps(
    precisions: Sequence[Precision],
    save_less: bool,
    unsupported: Callable[[OpGraph, Precision], Mapping[str, str]],
) -> list[RoundStep]:
    """List the steps of a round; `save_less` appends each step once more, saving less for backward.

    An operator runs in FP32 if its kind lacks the precision or the device does not support it
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
    """Choose `num` mixed assignments that together cover most keys of a profile.

    Keys are (operator, mode) pairs, each beside products of equal and of other precision, and casts.

    The choice is a greedy cover. Draw random assignments, then `num` times take the assignment with the most
    keys that no uniform and no taken assignment has. Keys for the price of a switch come first, until enough
    products of each precision have them. Ties go to the assignment whose keys were covered least often: a
    small graph is covered soon, and different mixtures add more than repeats of one. In every other draw,
    neighbours often have the same precision, as in plans.

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
        """Count products by (precision, way) that new keys complete to both equal and other neighbours."""
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
    """Draw a precision per operator; with probability `staying`, repeat the previous operator's."""
    drawn: Assignment = {}
    before: Precision | None = None
    for name, found in usable.items():
        stays = draw.random() < staying
        before = before if stays and before is not None and before in found else draw.choice(found)
        drawn[name] = before
    return drawn


def _shown(graph: OpGraph, assignment: Assignment, float_16bit: str | None) -> set[tuple[Hashable, ...]]:
    """Return the keys that a step under an assignment covers: profile keys, and neighbours of products."""
    keys: set[tuple[Hashable, ...]] = set()
    for node in lower(graph, assignment, float_16bit).nodes:
        if isinstance(node, Cast):
            keys.add(node.profile_key)
        else:
            keys.add((node.op, node.timed_as))
            keys.add(_Beside(node.op, node.timed_as, node.mode, "after", node.after_other))
            keys.add(_Beside(node.op, node.timed_as, node.mode, "before", node.before_other))
    return keys

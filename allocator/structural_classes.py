"""Structural classes: groups of operators that have equal neighbourhoods, so that one result holds for all.

A model of eighty equal blocks has some ten structural classes, not thousands. Two operators are in one
structural class if they, and the operators connected with them up to some distance, agree in kind, shapes,
costs in every mode, and present precision. Measured costs never agree to the last digit, so with them every
operator is a class of its own; costs from data sheets or laws do agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.allocator.problem import ClassProblem
from qsync.lowering.wiring import Wiring, wiring
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.identity_cache import IdentityCache
from qsync.records.precision import Precision

Hashes = npt.NDArray[np.uint64]

# Operators farther away than this many edges do not count. In all models tried a cast depends on nearer ones
# alone. Were it otherwise, replay would reject the result.
_DISTANCE = 12
# A value read by more operators than this (a mask that every block reads) does not connect them.
_MAX_READERS = 8
_BESIDE = 1 << 20  # in the place of a slot: an edge between products that run one after the other
_NUMBER = {precision: number for number, precision in enumerate(Precision)}


class _Edges:
    """The edges of a graph between values as `Wiring` numbers them, sorted by target."""

    def __init__(self, wired: Wiring, beside: bool) -> None:
        ends = [
            (value, wired.offset + i, j)
            for i, operands in enumerate(wired.operands)
            for j, value in enumerate(operands)
        ]
        down = [(value, reader, 2 * j) for value, reader, j in ends]
        up = [
            (reader, value, 2 * j + 1)
            for value, reader, j in ends
            if len(wired.consumers[value]) <= _MAX_READERS
        ]
        if beside:  # a product costs more beside one of another precision
            pairs = [(wired.offset + i, wired.offset + j) for i, j in enumerate(wired.after) if j is not None]
            down += [(i, j, _BESIDE) for i, j in pairs]
            up += [(j, i, _BESIDE + 1) for i, j in pairs]
        edges = np.array(sorted(down + up, key=lambda edge: edge[1]), dtype=np.int64).reshape(-1, 3)
        self.source, target, slot = edges.T
        self.salt = _scattered(slot.astype(np.uint64) + np.uint64(1))
        self.target, self.start = np.unique(target, return_index=True)


_EDGES: IdentityCache[dict[bool, _Edges]] = IdentityCache()


class StructuralClasses:
    """The structural classes of one device class's operators, while their precisions change."""

    def __init__(self, graph: OpGraph, part: ClassProblem) -> None:
        wired = wiring(graph)
        self._offset = wired.offset
        self._adjustable = [i for i, op in enumerate(graph.ops) if op.role is Role.ADJUSTABLE]
        self._own = _numbered(_keys(part, wired))
        of_graph, beside = _EDGES.of(graph, dict), bool(part.profile.switch_s)
        if beside not in of_graph:
            of_graph[beside] = _Edges(wired, beside)
        self._edges = of_graph[beside]

    def structural_classes(self, precision: Sequence[Precision]) -> dict[int, int]:
        """Return the structural class of every adjustable operator, by position.

        `precision` holds the present precision of every operator.
        """
        now = self._own.copy()
        at = self._adjustable
        now[[self._offset + i for i in at]] += np.array(
            [_NUMBER[precision[i]] + 1 for i in at], dtype=np.uint64
        ) << np.uint64(32)
        now = _scattered(now)
        edges = self._edges
        for _ in range(_DISTANCE if len(edges.start) else 0):
            sent = np.add.reduceat(_scattered(now[edges.source] ^ edges.salt), edges.start)
            now[edges.target] = _scattered(now[edges.target] * np.uint64(3) + sent)
        return dict(zip(at, now[[self._offset + i for i in at]].tolist(), strict=True))


def _keys(part: ClassProblem, wired: Wiring) -> list[Hashable]:
    """Return for every value the properties that two values of one class share, neighbours aside."""
    casts: dict[str, list[Any]] = {}
    for (value, source, target), cost in sorted(part.profile.casts.items()):
        casts.setdefault(value, []).append((source, target, cost))
    found: list[Hashable] = []
    for entry in wired.entries:
        common = (entry.kind, entry.shape, entry.dtype, entry.requires_grad, tuple(casts.get(entry.name, ())))
        found.append((*common, *_of_op(entry, part)) if isinstance(entry, Op) else common)
    return found


def _of_op(op: Op, part: ClassProblem) -> tuple[Hashable, ...]:
    costs = tuple(part.profile.ops.get(op.name, {}).items())
    choices, saves_less = frozenset(part.choices.get(op.name, ())), op.name in part.saving_less
    return op.role, op.magnitude, op.exposed, costs, choices, saves_less


def _numbered(keys: Sequence[Hashable]) -> Hashes:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.uint64)


def _scattered(numbers: Hashes) -> Hashes:
    """Return every number hashed to 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))

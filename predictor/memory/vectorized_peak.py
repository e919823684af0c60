"""The memory peak of a whole lowered graph at once, from tensors that are looked up by number.

What an operator needs, and how the tensors of a value live, depends on the neighbourhoods (`qsync.lowering.vectorized`)
of the operators that make and read it. `qsync.predictor.memory.lifetimes` is asked once for every distinct case; the
answer is kept as bytes that come and go at times relative to the value's first operator, which hold wherever
in the graph the case occurs again. Nothing of an assignment is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.lowering.lowered_graph import Cast, Run
from qsync.lowering.vectorized import Tables, Tabulated, tables
from qsync.predictor.memory.lifetimes import PASSES_GRADIENT, Layout, Lifetimes, layout
from qsync.predictor.memory.peak import StepMemory, bytes_throughout, margin_bytes
from qsync.predictor.memory.saved_tensors import Kept
from qsync.predictor.memory.spans import Span
from qsync.records.graph import OpGraph
from qsync.records.identity_cache import Remembered

Ints = npt.NDArray[np.int64]

# How a time follows from a family's base, the place of the first operator that makes or reads it: not at all,
# in forward after it, in backward before it.
_ABSOLUTE, _FORWARD, _BACKWARD = 0, 1, -1


class Footprints:
    """The tensors of one graph on one kind of device, by case; `in_buckets` as in `Lifetimes`."""

    def __init__(self, graph: OpGraph, device: str, in_buckets: bool) -> None:
        self.layout: Layout = layout(graph)
        self.tables: Tables = tables(graph)
        self.device, self.in_buckets = device, in_buckets
        self.throughout = bytes_throughout(graph)
        self._num_ops = len(graph.ops)
        self._kept: dict[tuple[int, str, str], Kept] = {}
        # By neighbourhood: bytes while it waits for backward, in forward, in backward, and in the middle.
        self._needs: list[tuple[int, int, int, int] | None] = []
        self._list_families()
        # All cases one after the other: bytes that come (or go), at which time.
        self._bytes: list[int] = []
        self._signs: list[int] = []
        self._offsets: list[int] = []
        self._bounds: list[int] = [0]
        self._arrays: tuple[Ints, Ints, Ints, Ints] | None = None

    def _list_families(self) -> None:
        """Every value that is no view, with the operators that make or read it, and what it is like."""
        layout = self.layout
        kinds: dict[Any, dict[bytes, int]] = {}
        self._roots: list[str] = []
        self._cases: list[dict[bytes, int]] = []
        # What a family sees of each operator, by number of the view and of the neighbourhood.
        self._aspects: Ints = np.zeros((0, 0), dtype=np.int64)
        self._aspect_numbers: dict[Any, int] = {}
        views: dict[tuple[int, ...], int] = {(): 0}
        involved: list[int] = []
        seen: list[int] = []
        bounds, bases = [0], []
        for root, ops in layout.involved.items():
            if ops:
                self._roots.append(root)
                self._cases.append(kinds.setdefault(self._kind(root, ops), {}))
                involved += ops
                for i in ops:
                    view = self._view(root, i)
                    seen.append(views.setdefault(view, len(views)))
                bounds.append(len(involved))
                bases.append(ops[0])
        self._views = list(views)
        self._involved, self._seen = np.array(involved, dtype=np.int64), np.array(seen, dtype=np.int64)
        self._bases = np.array(bases, dtype=np.int64)
        # Slices of the bytes that the neighbourhoods of all involved operators make.
        self._slices = [slice(4 * a, 4 * b) for a, b in pairwise(bounds)]

    def _kind(self, root: str, involved: list[int]) -> Any:
        """All that `Lifetimes` reads of a value but for how operators run; places relative to the first."""
        layout, base = self.layout, involved[0]
        first = layout.position.get(root)
        entered = None
        if first is None:
            value = self.tables.wiring.inputs[self.tables.wiring.number[root]]
            entered = (value.kind, value.dtype, value.shape)
        ends = any(layout.ops[i].kind == "output" for i in involved) or not base
        return entered, base if ends else None, tuple(self._part(root, i, base) for i in involved)

    def _part(self, root: str, i: int, base: int) -> Any:
        op, layout, product = self.layout.ops[i], self.layout, self.tables.wiring.product[i]
        own = [
            (j, layout.position.get(value, base - 1) - base)
            for j, value in enumerate((*op.inputs, *op.kept))
            if layout.root[value] == root
        ]
        order: tuple[int, ...] = ()
        if op.kind in PASSES_GRADIENT:
            places = [layout.position.get(layout.root[value], -1) for value in op.inputs]
            order = tuple(sorted(set(places)).index(place) for place in places)
        together = None if product is None else product - base
        structure = int(self.tables.structure[i])
        return structure, i - base, layout.root[op.name] == root, tuple(own), order, together

    def _view(self, root: str, i: int) -> tuple[int, ...]:
        """Which operands, then which of those kept as they are, a family sees; none: the whole operator."""
        op, layout = self.layout.ops[i], self.layout
        if layout.root[op.name] == root or op.kind in PASSES_GRADIENT:
            return ()
        return tuple(j for j, v in enumerate((*op.inputs, *op.kept)) if layout.root[v] == root)

    def _aspect(self, i: int, view: tuple[int, ...], lives: Lifetimes) -> Any:
        """What `Lifetimes` reads of an operator that reads a family's values but makes none and sums none."""
        op, run, kept = self.layout.ops[i], lives.runs[i], lives.kept(i)
        values = (*op.inputs, *op.kept)
        taken = tuple(run.operands[j] for j in view if j < len(op.inputs))
        saves = tuple((j in kept.inputs, values[j] in kept.indices) for j in view)
        return taken, saves  # whether it runs in a product's epilogue, the product says, whose value it reads

    def _see(self, lowered: Tabulated, lives: Lifetimes) -> Ints:
        """A number for what every family sees of every operator that makes or reads it."""
        numbers = lowered.neighbourhood[self._involved]
        missing = len(self.tables.runs) - self._aspects.shape[1]
        if missing > 0:
            more = np.full((len(self._views), 2 * missing), -1)
            had = self._aspects if len(self._aspects) else np.zeros((len(self._views), 0), dtype=np.int64)
            self._aspects = np.concatenate((had, more), axis=1)
        found = self._aspects[self._seen, numbers]
        for at in np.flatnonzero(found < 0).tolist():
            view, number = int(self._seen[at]), int(numbers[at])
            if self._aspects[view, number] < 0:
                # Of an operator that is seen whole the neighbourhood itself is what is seen.
                aspect = (
                    self._aspect(int(self._involved[at]), self._views[view], lives)
                    if self._views[view]
                    else number
                )
                known = self._aspect_numbers
                self._aspects[view, number] = known.setdefault(aspect, len(known))
        return self._aspects[self._seen, numbers]

    def peak_bytes(self, lowered: Tabulated, optimizer_bytes: int) -> int:
        """The most bytes in use at any time of the step, margin included: `StepMemory.peak_bytes`."""
        most = max(0, int(self.in_use(lowered).max()))
        return optimizer_bytes + self.throughout + most + margin_bytes(self.device, most)

    def in_use(self, lowered: Tabulated) -> Ints:
        """Bytes of what comes and goes, at each time of the step."""
        change = np.zeros(2 * self._num_ops + 2, dtype=np.int64)
        runs, casts = _Runs(lowered), _Casts(lowered)
        lives = Lifetimes(self.layout, runs, casts, self.device, self.in_buckets, self._kept)
        self._add_needs(change, lowered, lives)
        self._add_families(change, lowered, lives)
        found: Ints = change.cumsum()
        return found

    def _add_needs(self, change: Ints, lowered: Tabulated, lives: Lifetimes) -> None:
        numbers = lowered.neighbourhood
        self._needs += [None] * (len(self.tables.runs) - len(self._needs))
        new = [n for n in np.unique(numbers).tolist() if self._needs[n] is None]
        for number in new:
            i = int(np.flatnonzero(numbers == number)[0])
            self._needs[number] = self._summed(i, lives.of(i))
        rows = np.array([row or (0, 0, 0, 0) for row in self._needs], dtype=np.int64)[numbers]
        saved, forward, backward, middle = rows.T
        n = self._num_ops
        end = 2 * n
        change[:n] += saved + forward
        change[1 : n + 1] -= forward
        change[end : end - n : -1] += backward  # operator i at end - i
        change[end + 1 : end + 1 - n : -1] -= backward + saved
        change[n] += middle.sum()
        change[n + 1] -= middle.sum()

    def _summed(self, i: int, spans: Iterable[Span]) -> tuple[int, int, int, int]:
        found = [0, 0, 0, 0]
        back = 2 * self._num_ops - i
        times = {(i, back): 0, (i, i): 1, (back, back): 2, (self._num_ops, self._num_ops): 3}
        for span in spans:
            found[times[span.birth, span.death]] += span.num_bytes
        return found[0], found[1], found[2], found[3]

    def _add_families(self, change: Ints, lowered: Tabulated, lives: Lifetimes) -> None:
        every = self._see(lowered, lives).astype("<u4").tobytes()
        numbers = [known.get(every[at], -1) for known, at in zip(self._cases, self._slices, strict=True)]
        if -1 in numbers:
            for family, number in enumerate(numbers):
                if number < 0:
                    numbers[family] = self._case(family, every[self._slices[family]], lives)
        size, sign, offset, bound = self._as_arrays()
        case = np.array(numbers, dtype=np.int64)
        start, count = bound[case], bound[case + 1] - bound[case]
        each = np.repeat(np.arange(len(case)), count)
        at = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count) + start[each]
        np.add.at(change, offset[at] + sign[at] * self._bases[each], size[at])

    def _case(self, family: int, key: bytes, lives: Lifetimes) -> int:
        """The number of the case that a family is now; asked for if nothing like it was met before."""
        known = self._cases[family]
        if key not in known:
            known[key] = len(self._bounds) - 1
            base = int(self._bases[family])
            points: dict[tuple[int, int], int] = {}
            for span in lives.of(self._roots[family]):
                both = ((span.birth, 0, span.num_bytes), (span.death, 1, -span.num_bytes))
                for time, after, num_bytes in both:
                    sign, offset = self._relative(time, base)
                    points[sign, offset + after] = points.get((sign, offset + after), 0) + num_bytes
            for (sign, offset), num_bytes in points.items():
                if num_bytes:
                    self._signs.append(sign)
                    self._offsets.append(offset)
                    self._bytes.append(num_bytes)
            self._bounds.append(len(self._bytes))
            self._arrays = None
        return known[key]

    def _relative(self, time: int, base: int) -> tuple[int, int]:
        """A time as sign and offset: time = offset + sign * base.

        The times between forward and backward and at the end are the graph's own. What reaches them by being
        at an end itself is of a kind of its own (`_kind`).
        """
        if time < self._num_ops:
            return _FORWARD, time - base
        if time in (self._num_ops, 2 * self._num_ops):
            return _ABSOLUTE, time
        return _BACKWARD, time + base

    def _as_arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        if self._arrays is None:
            lists = (self._bytes, self._signs, self._offsets, self._bounds)
            size, sign, offset, bound = (np.array(entries, dtype=np.int64) for entries in lists)
            self._arrays = (size, sign, offset, bound)
        return self._arrays


class _Runs:
    """How operators run, made when it is asked for."""

    def __init__(self, lowered: Tabulated) -> None:
        self._lowered = lowered
        self._made: dict[int, Run] = {}

    def __getitem__(self, i: int) -> Run:
        run = self._made.get(i)
        if run is None:
            run = self._made[i] = self._lowered.run(i)
        return run


class _Casts:
    """The casts of values, made when they are asked for."""

    def __init__(self, lowered: Tabulated) -> None:
        self._lowered = lowered

    def __getitem__(self, value: str) -> list[tuple[int, Cast]]:
        wiring = self._lowered.tables.wiring
        number = wiring.number[value]
        return [(wiring.owner(number) or 0, cast) for cast in self._lowered.casts(number)]


_FOOTPRINTS: Remembered[dict[tuple[str, bool], Footprints]] = Remembered()


def peak_bytes(
    lowered: Tabulated, *, optimizer_bytes: int = 0, num_ranks: int = 1, device: str = "cpu"
) -> int:
    """The memory peak of one training step on one rank, in bytes, as `peak_memory(...).peak_bytes` has it.

    >>> peak_bytes(Tabulated(graph, assignment), optimizer_bytes=profile.optimizer_bytes)
    """
    if lowered.graph.recomputed:  # whose tensors live twice, at times that follow no base
        step = StepMemory(
            lowered.lowered(), optimizer_bytes=optimizer_bytes, num_ranks=num_ranks, device=device
        )
        return step.peak_bytes
    of_graph = _FOOTPRINTS.of(lowered.graph, dict)
    key = (device, num_ranks > 1)
    if key not in of_graph:
        of_graph[key] = Footprints(lowered.graph, *key)
    return of_graph[key].peak_bytes(lowered, optimizer_bytes)

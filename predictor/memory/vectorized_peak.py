"""The memory peak of a lowered graph by array lookups: a fast form of `peak`, equal to the byte.

The tensors of an operator and of a value depend on the neighbourhoods (`qsync.lowering.table`) of the
operators that compute and read them. `lifetimes` computes each distinct case once. A case is stored as
allocated and freed bytes at times relative to the value's first operator, so it applies wherever it occurs in
the graph. Nothing of an assignment is stored. With recomputed blocks, tensors live twice at absolute times,
so each operator and value is a case of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.lowering.incremental import Lowering
from qsync.lowering.lowered_graph import Cast
from qsync.lowering.table import Table, table
from qsync.operators.precision import Precision
from qsync.operators.registry import declared
from qsync.predictor.memory.layout import Layout, layout
from qsync.predictor.memory.lifetimes import Lifetimes
from qsync.predictor.memory.peak import bytes_throughout, margin_parts
from qsync.predictor.memory.saved_tensors import Saved
from qsync.predictor.memory.spans import Span
from qsync.records.graph import OpGraph
from qsync.records.identity_cache import IdentityCache
from qsync.records.memory_residuals import MemoryResiduals

Ints = npt.NDArray[np.int64]

# The factor of a group's base in its times: none (absolute), forward (time = base + offset), backward (time =
# offset - base). The base is the position of the first operator that computes or reads the value.
_ABSOLUTE, _FORWARD, _BACKWARD = 0, 1, -1


class VectorizedPeak:
    """The cached tensors of one graph on one kind of device; `in_buckets` as in `Lifetimes`."""

    def __init__(self, graph: OpGraph, device: str, in_buckets: bool) -> None:
        self.layout: Layout = layout(graph)
        self.table: Table = table(graph)
        self.device, self.in_buckets = device, in_buckets
        self.throughout = bytes_throughout(graph)
        self._num_ops = len(graph.ops)
        self._saved: dict[tuple[int, str, str], Saved] = {}
        self._residuals: IdentityCache[_ResidualRows] = IdentityCache()
        # Neighbourhood number -> bytes saved for backward, in forward, in backward, and at the loss.
        self._op_bytes: list[tuple[int, int, int, int] | None] = []
        self._list_groups()
        # All cases concatenated: allocated (negative: freed) bytes, with the sign and offset of their time.
        self._bytes: list[int] = []
        self._signs: list[int] = []
        self._offsets: list[int] = []
        self._bounds: list[int] = [0]
        self._arrays: tuple[Ints, Ints, Ints, Ints] | None = None

    def _list_groups(self) -> None:
        """List every value that is no view, with the operators that compute or read it, and its kind."""
        layout = self.layout
        kinds: dict[Any, dict[bytes, int]] = {}
        self._roots: list[str | int] = []
        self._cases: list[dict[bytes, int]] = []
        # Numbers of the aspects of operators that matter to groups, by view number and neighbourhood number.
        self._aspects: Ints = np.zeros((0, 0), dtype=np.int64)
        self._aspect_numbers: dict[Any, int] = {}
        views: dict[tuple[int, ...], int] = {(): 0}
        users, view_of = list[int](), list[int]()
        bounds, bases = [0], []
        groups: list[tuple[str | int, list[int]]] = [*layout.users.items()]
        if layout.recomputed:  # an operator's residuals depend on the preceding product
            groups += [(i, [i, product]) for i, product in enumerate(layout.product)]
        for root, ops in groups:
            if ops:
                self._roots.append(root)
                self._cases.append(kinds.setdefault(self._kind(root, ops), {}))
                users += ops
                for i in ops:
                    view = self._view(root, i)
                    view_of.append(views.setdefault(view, len(views)))
                bounds.append(len(users))
                bases.append(ops[0])
        self._views = list(views)
        self._users, self._view_of = np.array(users, dtype=np.int64), np.array(view_of, dtype=np.int64)
        self._bases = np.array(bases, dtype=np.int64)
        # Byte ranges of each group's users in the concatenated aspect numbers (4 bytes each).
        self._slices = [slice(4 * a, 4 * b) for a, b in pairwise(bounds)]

    def _kind(self, root: str | int, users: list[int]) -> Any:
        """Return a key of all that `Lifetimes` reads of a value except runs, with relative positions."""
        layout, base = self.layout, users[0]
        if layout.recomputed or isinstance(root, int):
            return root
        first = layout.position.get(root)
        entered = None
        if first is None:
            value = self.table.wiring.inputs[self.table.wiring.number[root]]
            entry = layout.entered.get(root)
            enters = None if entry is None else (entry, base)
            entered = (value.kind, value.dtype, value.shape, value.channels_last, enters)
        # The backward of an activation runs with its product's, whose position may be 0.
        starts = not base or any(self.table.wiring.product[i] == 0 for i in users)
        ends = starts or any(layout.ops[i].kind == "output" for i in users)
        return entered, base if ends else None, tuple(self._part(root, i, base) for i in users)

    def _part(self, root: str, i: int, base: int) -> Any:
        """Return a key of operator `i`'s relation to a value, independent of its run."""
        op, layout, product = self.layout.ops[i], self.layout, self.table.wiring.product[i]
        own = [
            (j, layout.position.get(value, base - 1) - base)
            for j, value in enumerate((*op.inputs, *op.kept))
            if layout.root[value] == root
        ]
        order: tuple[int, ...] = ()
        if declared(op.kind).passes_gradient:
            places = [layout.position.get(layout.root[value], -1) for value in op.inputs]
            order = tuple(sorted(set(places)).index(place) for place in places)
        epilogue_of = None if product is None else product - base
        structure = int(self.table.structure[i])
        return structure, i - base, layout.root[op.name] == root, tuple(own), order, epilogue_of

    def _view(self, root: str | int, i: int) -> tuple[int, ...]:
        """List the operand indices that matter to a group (kept values follow); empty for all."""
        op, layout = self.layout.ops[i], self.layout
        if layout.root[op.name] == root or declared(op.kind).passes_gradient:
            return ()
        return tuple(j for j, v in enumerate((*op.inputs, *op.kept)) if layout.root[v] == root)

    def _aspect(self, i: int, view: tuple[int, ...], lives: Lifetimes) -> Any:
        """Return a key of all that `Lifetimes` reads of an operator that only reads a group's values."""
        op, run, saved = self.layout.ops[i], lives.run(i), lives.saved(i)
        values = (*op.inputs, *op.kept)
        taken = tuple(run.operands[j] for j in view if j < len(op.inputs))
        saves = tuple((j in saved.inputs, values[j] in saved.indices) for j in view)
        return taken, saves  # the product's own neighbourhood shows epilogues

    def _aspects_now(self, lowered: Lowering, lives: Lifetimes) -> Ints:
        """Return, for each user of a storage group, the number of its aspect (see `_aspect`)."""
        numbers = lowered.row[self._users]
        missing = len(self.table.rows) - self._aspects.shape[1]
        if missing > 0:
            more = np.full((len(self._views), 2 * missing), -1)
            had = self._aspects if len(self._aspects) else np.zeros((len(self._views), 0), dtype=np.int64)
            self._aspects = np.concatenate((had, more), axis=1)
        found = self._aspects[self._view_of, numbers]
        for at in np.flatnonzero(found < 0).tolist():
            view, number = int(self._view_of[at]), int(numbers[at])
            if self._aspects[view, number] < 0:
                # The aspect of a whole operator is its neighbourhood.
                aspect = (
                    self._aspect(int(self._users[at]), self._views[view], lives)
                    if self._views[view]
                    else number
                )
                known = self._aspect_numbers
                self._aspects[view, number] = known.setdefault(aspect, len(known))
        return self._aspects[self._view_of, numbers]

    def bytes_by_time(
        self,
        lowered: Lowering,
        optimizer_bytes: int,
        optimizer_workspace: int = 0,
        residuals: MemoryResiduals | None = None,
    ) -> Ints:
        """Return the bytes in use, with margin, at each time of the step."""
        in_use = self.in_use(lowered, residuals)
        in_use[self.layout.last] += optimizer_workspace
        most = np.maximum(in_use, 0)
        corrected = bool(residuals and self._rows_of(residuals, lowered).any())
        share, constant = margin_parts(self.device, self.layout.recomputed is not None, corrected)
        found: Ints = optimizer_bytes + self.throughout + most + np.ceil(share * most).astype(np.int64)
        return found + constant

    def in_use(self, lowered: Lowering, residuals: MemoryResiduals | None = None) -> Ints:
        """Return the bytes of temporary tensors at each time of the step."""
        change = np.zeros(self.layout.last + 2, dtype=np.int64)
        wiring, recomputed = self.table.wiring, self.layout.recomputed is not None

        def casts(value: str) -> list[tuple[int, Cast]]:
            number = wiring.number[value]
            return [(wiring.owner(number) or 0, cast) for cast in lowered.casts(number)]

        inside = residuals if recomputed else None
        run = cache(lowered.run)
        lives = Lifetimes(self.layout, run, casts, self.device, self.in_buckets, self._saved, inside)
        if not recomputed:
            self._add_ops(change, lowered, lives)
        self._add_groups(change, lowered, lives)
        if residuals:
            if not recomputed:
                rows = self._rows_of(residuals, lowered)
                self._add_rows(change, np.column_stack((rows, np.zeros(len(rows), dtype=np.int64))))
            of_loss = residuals.loss.forward
            change[self._num_ops : self._num_ops + 2] += (of_loss, -of_loss)
        found: Ints = change.cumsum()
        return found

    def _rows_of(self, residuals: MemoryResiduals, lowered: Lowering) -> Ints:
        return self._residuals.of(residuals, lambda: _ResidualRows(self.layout, residuals)).of(lowered)

    def _add_ops(self, change: Ints, lowered: Lowering, lives: Lifetimes) -> None:
        numbers = lowered.row
        self._op_bytes += [None] * (len(self.table.rows) - len(self._op_bytes))
        new = [n for n in np.unique(numbers).tolist() if self._op_bytes[n] is None]
        for number in new:
            i = int(np.flatnonzero(numbers == number)[0])
            self._op_bytes[number] = self._sum_by_time(i, lives.spans_of(i))
        rows = np.array([row or (0, 0, 0, 0) for row in self._op_bytes], dtype=np.int64)
        self._add_rows(change, rows[numbers])

    def _add_rows(self, change: Ints, rows: Ints) -> None:
        """Add rows of bytes per operator: saved for backward, in forward, in backward, at the loss."""
        saved, forward, backward, middle = rows.T
        n = self._num_ops
        end = 2 * n
        change[:n] += saved + forward
        change[1 : n + 1] -= forward
        change[end : end - n : -1] += backward  # operator i at end - i
        change[end + 1 : end + 1 - n : -1] -= backward + saved
        change[n] += middle.sum()
        change[n + 1] -= middle.sum()

    def _sum_by_time(self, i: int, spans: Iterable[Span]) -> tuple[int, int, int, int]:
        found = [0, 0, 0, 0]
        back = 2 * self._num_ops - i
        times = {(i, back): 0, (i, i): 1, (back, back): 2, (self._num_ops, self._num_ops): 3}
        for span in spans:
            found[times[span.birth, span.death]] += span.num_bytes
        return found[0], found[1], found[2], found[3]

    def _add_groups(self, change: Ints, lowered: Lowering, lives: Lifetimes) -> None:
        aspects = self._aspects_now(lowered, lives).astype("<u4").tobytes()
        numbers = [known.get(aspects[at], -1) for known, at in zip(self._cases, self._slices, strict=True)]
        if -1 in numbers:
            for group, number in enumerate(numbers):
                if number < 0:
                    numbers[group] = self._case(group, aspects[self._slices[group]], lives)
        size, sign, offset, bound = self._as_arrays()
        case = np.array(numbers, dtype=np.int64)
        start, count = bound[case], bound[case + 1] - bound[case]
        each = np.repeat(np.arange(len(case)), count)
        at = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count) + start[each]
        np.add.at(change, offset[at] + sign[at] * self._bases[each], size[at])

    def _case(self, group: int, key: bytes, lives: Lifetimes) -> int:
        """Return the number of the case with this key in a group; compute and store a new case."""
        known = self._cases[group]
        if key not in known:
            known[key] = len(self._bounds) - 1
            base = int(self._bases[group])
            points: dict[tuple[int, int], int] = {}
            for span in lives.spans_of(self._roots[group]):
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
        """Return a time as sign and offset: time = offset + sign * base.

        The times of the loss and of the step's end are absolute. Values at either end of the graph, whose
        relative times may coincide with these, have kinds of their own (`_kind`).
        """
        if self.layout.recomputed or time in (self._num_ops, 2 * self._num_ops):
            return _ABSOLUTE, time
        if time < self._num_ops:
            return _FORWARD, time - base
        return _BACKWARD, time + base

    def _as_arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        if self._arrays is None:
            lists = (self._bytes, self._signs, self._offsets, self._bounds)
            size, sign, offset, bound = (np.array(entries, dtype=np.int64) for entries in lists)
            self._arrays = (size, sign, offset, bound)
        return self._arrays


class _ResidualRows:
    """The residuals of one graph's operators, by precision and operator."""

    def __init__(self, layout: Layout, residuals: MemoryResiduals) -> None:
        self._rows: Ints = np.array(
            [[residuals.of(op.name, precision) for op in layout.ops] for precision in Precision],
            dtype=np.int64,
        )
        self._product = np.array(layout.product, dtype=np.int64)

    def of(self, lowered: Lowering) -> Ints:
        """Return the residual bytes (saved, forward, backward) of every operator under an assignment."""
        found: Ints = self._rows[lowered.numbers[self._product], np.arange(len(self._product))]
        return found


_PEAKS: IdentityCache[IdentityCache[dict[tuple[str, bool], VectorizedPeak]]] = IdentityCache()


def vectorized_bytes(
    lowered: Lowering,
    *,
    optimizer_bytes: int = 0,
    optimizer_workspace: int = 0,
    num_ranks: int = 1,
    device: str = "cpu",
    residuals: MemoryResiduals | None = None,
) -> Ints:
    """Predict the bytes in use on one rank, with margin, at each time of a training step.

    The most of them is `peak_memory(...).peak_bytes`.

    >>> vectorized_bytes(Lowering(graph, assignment), optimizer_bytes=profile.optimizer_bytes).max()
    """
    graph, key = lowered.graph, (device, num_ranks > 1)
    # The cases of graphs with recomputed blocks include residuals.
    known = _PEAKS.of(graph, IdentityCache).of(residuals if graph.recomputed and residuals else graph, dict)
    if key not in known:
        known[key] = VectorizedPeak(graph, *key)
    return known[key].bytes_by_time(lowered, optimizer_bytes, optimizer_workspace, residuals)

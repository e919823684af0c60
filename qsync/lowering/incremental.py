"""Lowering of an assignment: each operator's row of the graph's table, and each value's casts.

lower(graph, assignment) -> LoweredGraph

A change of one operator looks up its neighbourhood again, and can be undone exactly. Two properties pass
along chains, one operator at a time: types forward through following operators (and with them the memory
order of images), and the demand for 16 bits backward. The rest depends on neighbours alone (`Table`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.lowering.numbering import Ints
from qsync.lowering.table import BY_NUMBER, NUMBER, Bools, Facts, as_array, table
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import EPILOGUES
from qsync.records.graph import OpGraph

# One undoable write: the list or array, the index, and the old value.
_Write = tuple[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one `Lowering.assign`: operators with other nodes or casts, and data to undo it."""

    touched: tuple[int, ...]
    journal: tuple[_Write, ...]


def lower(
    graph: OpGraph,
    assignment: Mapping[str, Precision],
    carried_16bit: str | None = "bf16",
    saving_less: Collection[str] = (),
) -> LoweredGraph:
    """Lower a graph: return it with the casts that an assignment of precisions needs.

    `assignment` maps names of adjustable operators to precisions; operators it leaves out run in FP32.
    `carried_16bit` is the device's 16-bit float for tensors between operators, or None. `saving_less` names
    following operators that save less for backward. Raises MismatchError for names that are not adjustable
    operators of the graph, or cannot save less, and FormatError for a precision that an operator of this kind
    does not have.

    >>> lower(graph, {"encoder.0.fc1": Precision.BF16}, saving_less=["encoder.0.gelu"]).nodes
    """
    return Lowering(graph, assignment, carried_16bit, saving_less).lowered()


class Lowering:
    """The lowered graph of an assignment, updated where operators change.

    `row[i]` is the number of operator `i`'s row in `Table.rows`, and `cast_set[value]` that of a value's
    casts in `Table.cast_sets`.
    """

    def __init__(
        self,
        graph: OpGraph,
        assignment: Mapping[str, Precision],
        carried_16bit: str | None = "bf16",
        saving_less: Collection[str] = (),
    ) -> None:
        self.graph, self.carried_16bit = graph, carried_16bit
        self.table = table(graph)
        self.wiring = self.table.wiring
        self.position, self._offset = self.wiring.position, self.wiring.offset
        num_ops, num_values = len(graph.ops), self.wiring.num_values
        self.facts = Facts(
            bytearray(num_ops), bytearray(num_ops + 1), bytearray(num_values), bytearray(num_values),
            bytearray(self.table.settled),
        )  # fmt: skip
        for name, precision in assignment.items():
            self.wiring.check(name, precision)
            self.facts.precision[self.position[name]] = NUMBER[precision]
        for name in saving_less:
            self.wiring.check_saving(name)
            self.facts.less[self.position[name]] = True
        self._num_lowered = [num_ops - self.facts.precision.count(0)]
        self._outputs = self.table.outputs(carried_16bit)
        for value in self.table.wanting:
            self.facts.wanted[value] = self._is_wanted(value)
        for i in self.table.open:
            self.facts.carried[self._offset + i] = self._type_of(i)
        for i in self.table.ordering:
            self.facts.order[self._offset + i] = self._makes_order(i)
        self.row = self._rows_of(np.arange(num_ops))
        self.cast_set = self._casts_of(np.arange(num_values))

    def copy(self, carried_16bit: str | None) -> Lowering:
        """Return a copy of this lowering for a device with this 16-bit float.

        The 16-bit float may differ only if no operator currently returns one.
        """
        other = copy(self)
        other.carried_16bit, other._outputs = carried_16bit, self.table.outputs(carried_16bit)
        other.facts, other._num_lowered = self.facts.copy(), list(self._num_lowered)
        other.row, other.cast_set = self.row.copy(), self.cast_set.copy()
        return other

    def precision(self, i: int) -> Precision:
        """Return the precision of operator `i`; FP32 for operators that are not adjustable."""
        return BY_NUMBER[self.facts.precision[i]]

    @property
    def numbers(self) -> npt.NDArray[np.uint8]:
        """Return the precisions of all operators, as positions among all precisions."""
        return as_array(self.facts.precision)

    def mode(self, i: int) -> str:
        """Return the precision or type in which operator `i` runs."""
        return self.table.rows[int(self.row[i])].mode

    def form(self, i: int) -> str:
        """Return the form in which operator `i` runs (see `Run.form`)."""
        return self.table.rows[int(self.row[i])].form

    def after_other(self, ops: Ints) -> Bools:
        """Return whether the products before products `ops` run in other precisions."""
        return self._differ(ops, self.table.before[ops])

    def before_other(self, ops: Ints) -> Bools:
        """Return whether the products after products `ops` run in other precisions."""
        return self._differ(ops, self.table.after[ops])

    def _differ(self, ops: Ints, others: Ints) -> Bools:
        found: Bools = (others >= 0) & (self.numbers[ops] != self.numbers[others])
        return found

    def computed_by(self, i: int) -> str | None:
        """Return the operator that operator `i` currently computes in its epilogue, if any."""
        follower = self.wiring.epilogue[i]
        computes = follower is not None and self.form(i) in EPILOGUES
        return self.graph.ops[follower].name if computes else None  # type: ignore[index]

    def output_casts(self, i: int) -> list[Cast]:
        """Return the casts right after operator `i`."""
        return self.casts(self._offset + i)

    def anchored_casts(self, i: int) -> list[Cast]:
        """Return the casts of graph inputs right before operator `i`."""
        return [cast for value in self.wiring.anchored[i] for cast in self.casts(value)]

    def casts(self, value: int) -> list[Cast]:
        """Return the casts of a value, by its number."""
        entry, kinds = self.wiring.entries[value], self.table.cast_kinds
        return [
            Cast(entry.name, source, target, entry.num_elements, entry.kind == "parameter", channels_last)
            for source, target, channels_last in map(
                kinds.__getitem__, self.table.cast_sets[self.cast_set[value]]
            )
        ]

    def run(self, i: int) -> Run:
        """Return operator `i` as a `Run` node."""
        found, at = self.table.rows[int(self.row[i])], np.array([i])
        return Run(
            self.graph.ops[i].name, found.mode, found.operands, found.output, found.form, found.channels_last,
            bool(self.after_other(at)[0]), bool(self.before_other(at)[0]), found.as_traced,
        )  # fmt: skip

    def assignment(self) -> dict[str, Precision]:
        """Return the current assignment: every adjustable operator with its precision."""
        return {
            op.name: self.precision(i) for i, op in enumerate(self.graph.ops) if op.role is Role.ADJUSTABLE
        }

    def casts_at(self, ops: Ints) -> tuple[Ints, Ints]:
        """Return all casts next to operators, in order: the numbers of their values and `cast_kinds`."""
        if len(ops) < len(self.graph.ops):
            anchored = self.wiring.anchored
            values = np.array([v for i in ops.tolist() for v in (*anchored[i], self._offset + i)])
        else:
            values = np.flatnonzero(self.table.owner >= 0)
        kinds = self.table.kinds_by_set[self.cast_set[values]]
        where, places = np.nonzero(kinds >= 0)
        return values[where], kinds[where, places]

    def lowered(self) -> LoweredGraph:
        """Return the current lowered graph."""
        nodes: list[Cast | Run] = []
        for i in range(len(self.graph.ops)):
            nodes += [*self.anchored_casts(i), self.run(i), *self.output_casts(i)]
        return LoweredGraph(self.graph, tuple(nodes))

    def assign(self, name: str, precision: Precision) -> Change:
        """Give one operator another precision and look up only its neighbourhood again."""
        return self.assign_all({name: precision})

    def assign_all(self, assignment: Mapping[str, Precision]) -> Change:
        """Give some operators other precisions and look up only their neighbourhoods again."""
        journal, operands = list[_Write](), self.wiring.operands
        had_lowered = has_lowered = self._num_lowered[0]
        own: list[int] = []
        for name, precision in assignment.items():
            self.wiring.check(name, precision)
            own.append(i := self.position[name])
            has_lowered += (not self.facts.precision[i]) - (not NUMBER[precision])
            _write(self.facts.precision, i, NUMBER[precision], journal)
        _write(self._num_lowered, 0, has_lowered, journal)
        values = self._pass_types_on(
            [*own, *self._pass_wants_on((v for i in own for v in operands[i]), journal)], journal
        )
        ops = {*own, *(self.wiring.replaced if not (had_lowered and has_lowered) else ())}
        for value in values:
            ops |= {value - self._offset, *self.wiring.consumers[value]}
        ops |= {f for j in ops if (f := self.wiring.epilogue[j]) is not None}
        if 1 in self.facts.less:  # sooner than any()
            ops |= {maker for j in ops for v in operands[j] if (maker := self.wiring.producer(v)) >= 0}
        changed = self._replace(self.row, sorted(ops), self._rows_of, journal)
        before, after = self.wiring.before, self.wiring.after
        beside = {j for i in own for j in (before[i], after[i]) if j is not None}
        stale = values.union(*(operands[j] for j in changed))
        recast = self._replace(self.cast_set, sorted(stale), self._casts_of, journal)
        casts = {owner for value in recast if (owner := self.wiring.owner(value)) is not None}
        return Change(tuple(sorted({*own, *changed, *beside, *casts})), tuple(journal))

    def undo(self, change: Change) -> None:
        """Restore the state before `change`, which must be the latest change not undone."""
        for target, index, old in reversed(change.journal):
            target[index] = old

    def _rows_of(self, ops: Ints) -> Ints:
        return self.table.rows_of(ops, self.facts, not self._num_lowered[0], self._is_saved)

    def _casts_of(self, values: Ints) -> Ints:
        return self.table.casts_of(values, self.row, self.facts)

    def _replace(self, held: Ints, at: list[int], found: Any, journal: list[_Write]) -> list[int]:
        """Look up these entries of `held` again; return those that changed."""
        where = np.array(at, dtype=np.int64)
        new = found(where)
        differ = np.flatnonzero(new != held[where])
        where = where[differ]
        journal.append((held, where, held[where]))
        held[where] = new[differ]
        changed: list[int] = where.tolist()
        return changed

    def _is_wanted(self, value: int) -> bool:
        """Return whether every consumer of this value would cast it to at most 16 bits."""
        for i, slots, at in self.table.wanting[value]:
            if slots:
                if slots & self.table.wide_slots[at + self.facts.precision[i]]:
                    return False
            elif not self.facts.wanted[at]:
                return False
        return True

    def _type_of(self, i: int) -> int:
        """Return the number of the type of an operator's result."""
        if self.graph.ops[i].role is Role.ADJUSTABLE:
            outputs = self._outputs[self.table.first_cell[i] + self.facts.precision[i]]
            return outputs[self.facts.wanted[self._offset + i]]
        return self.table.type_of(i, self.facts.carried)

    def _makes_order(self, i: int) -> bool:
        """Return whether an operator's result is images that lowering makes channels-last."""
        if self.table.makes_order[self.table.first_cell[i] + self.facts.precision[i]]:
            return True
        return self.table.passes_order[i] and bool(self.facts.order[self.wiring.operands[i][0]])

    def _is_saved(self, i: int) -> bool:
        """Return whether an adjustable consumer saves the result of operator `i`, or a view of it."""
        names = self.table.type_names
        return any(
            self.table.saved_as(reader, j, self.precision(reader)) == names[self.facts.carried[value]]
            for reader, j, value in self.wiring.storage_readers(self._offset + i)
        )

    def _pass_wants_on(self, values: Iterable[int], journal: list[_Write]) -> list[int]:
        """Update upstream which values are wanted in 16 bits; return their operators."""
        affected, pending = [], list(values)
        while pending:
            value = pending.pop()
            if value in self.table.wanting and _write(
                self.facts.wanted, value, self._is_wanted(value), journal
            ):
                affected.append(value - self._offset)
                pending += self.wiring.operands[value - self._offset]
        return affected

    def _pass_types_on(self, start: list[int], journal: list[_Write]) -> set[int]:
        """Update types and memory order downstream, in execution order; return changed values."""
        changed: set[int] = set()
        heap = sorted(set(start))
        queued = set(heap)
        while heap:
            i = heapq.heappop(heap)
            value = self._offset + i
            retyped = _write(self.facts.carried, value, self._type_of(i), journal)
            if _write(self.facts.order, value, self._makes_order(i), journal) or retyped:
                changed.add(value)
                for consumer in self.wiring.consumers[value]:
                    if consumer not in queued:
                        queued.add(consumer)
                        heapq.heappush(heap, consumer)
        return changed


def _write(target: Any, index: int, new: int, journal: list[_Write]) -> bool:
    old = target[index]
    if old == new:
        return False
    journal.append((target, index, old))
    target[index] = new
    return True

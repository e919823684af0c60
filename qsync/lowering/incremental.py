"""Lowering of one operator at a time: re-lower only its neighbourhood, and undo exactly.

lower(graph, assignment) -> LoweredGraph
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from qsync.lowering.cast_rules import (
    computes_follower,
    makes_channels_last,
    mode_of,
    needed_casts,
    output_of,
    run_form_of,
    taken_type,
    takes_16bit,
)
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.lowering.wiring import wiring
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import REPLACED
from qsync.records.graph import OpGraph

# One undoable write to a list: the list, the index, and the old value.
_Write = tuple[list[Any], int, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one `Lowering.assign`: changed nodes and casts, and data to undo it."""

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
    """The lowered graph of an assignment, updated one operator at a time."""

    def __init__(
        self,
        graph: OpGraph,
        assignment: Mapping[str, Precision],
        carried_16bit: str | None = "bf16",
        saving_less: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self.carried_16bit = carried_16bit
        self.wiring = wiring(graph)
        self.position = self.wiring.position
        self.anchored = self.wiring.anchored
        for name in assignment:
            self.wiring.check(name, assignment[name])
        for name in saving_less:
            self.wiring.check_saving(name)
        self.precision = [assignment.get(op.name, Precision.FP32) for op in graph.ops]
        self._offset = self.wiring.offset
        self._wanted_16bit = [False] * self.wiring.num_values
        self._mode = ["fp32"] * len(graph.ops)
        self._carried = list(self.wiring.traced)
        self.casts: list[tuple[str, ...]] = [()] * self.wiring.num_values
        self._saves_less = [False] * len(graph.ops)
        for name in saving_less:
            self._saves_less[self.position[name]] = True
        self._form = ["plain"] * len(graph.ops)
        self._num_lowered = [sum(p is not Precision.FP32 for p in assignment.values())]
        self._channels_last = [False] * self.wiring.num_values
        self._lower_everything()

    def copy(self, carried_16bit: str | None) -> Lowering:
        """Return a copy of this lowering for a device with this 16-bit float.

        The 16-bit float may differ only if no operator currently returns one.
        """
        other = copy(self)
        other.carried_16bit = carried_16bit
        other.precision, other.casts = list(self.precision), list(self.casts)
        other._wanted_16bit = list(self._wanted_16bit)
        other._mode, other._carried = list(self._mode), list(self._carried)
        other._form, other._channels_last = list(self._form), list(self._channels_last)
        other._num_lowered = list(self._num_lowered)
        return other

    def mode(self, i: int) -> str:
        """Return the precision or type in which operator `i` runs."""
        return self._mode[i]

    def form(self, i: int) -> str:
        """Return the form in which operator `i` runs (see `Run.form`)."""
        return self._form[i]

    def channels_last(self, i: int) -> bool:
        """Return whether operator `i` reads images that lowering made channels-last."""
        return any(self._channels_last[value] for value in self.wiring.operands[i])

    def after_other(self, i: int) -> bool:
        """Return whether the product before product `i` runs in another precision."""
        before = self.wiring.before[i]
        return before is not None and self._mode[before] != self._mode[i]

    def before_other(self, i: int) -> bool:
        """Return whether the product after product `i` runs in another precision."""
        after = self.wiring.after[i]
        return after is not None and self._mode[after] != self._mode[i]

    def as_traced(self, i: int) -> bool:
        """Return whether operator `i` runs torch's own kernel because no product is lowered."""
        return not self._num_lowered[0] and self.graph.ops[i].kind in REPLACED

    def output(self, i: int) -> str:
        """Return the type of the result of operator `i`."""
        return self._carried[self._offset + i]

    def computed_by(self, i: int) -> str | None:
        """Return the operator that operator `i` currently computes in its epilogue, if any."""
        follower = self.wiring.epilogue[i]
        return self.graph.ops[follower].name if follower is not None and self._computes(i) else None

    def output_casts(self, i: int) -> list[Cast]:
        """Return the casts right after operator `i`."""
        return self._casts_of(self._offset + i)

    def anchored_casts(self, i: int) -> list[Cast]:
        """Return the casts of graph inputs right before operator `i`."""
        return [cast for value in self.anchored[i] for cast in self._casts_of(value)]

    def run(self, i: int) -> Run:
        """Return operator `i` as a `Run` node."""
        operands = tuple(
            self._carried[value] if (taken := self._taken(i, j)) is None else taken
            for j, value in enumerate(self.wiring.operands[i])
        )
        name = self.graph.ops[i].name
        return Run(
            name, self._mode[i], operands, self.output(i), self._form[i], self.channels_last(i),
            self.after_other(i), self.before_other(i), self.as_traced(i),
        )  # fmt: skip

    def assignment(self) -> dict[str, Precision]:
        """Return the current assignment: every adjustable operator with its precision."""
        return {
            op.name: self.precision[i] for i, op in enumerate(self.graph.ops) if op.role is Role.ADJUSTABLE
        }

    def lowered(self) -> LoweredGraph:
        """Return the current lowered graph."""
        nodes: list[Cast | Run] = []
        for i in range(len(self.graph.ops)):
            nodes += [*self.anchored_casts(i), self.run(i), *self.output_casts(i)]
        return LoweredGraph(self.graph, tuple(nodes))

    def assign(self, name: str, precision: Precision) -> Change:
        """Give one operator another precision and re-lower only its neighbourhood."""
        self.wiring.check(name, precision)
        i = self.position[name]
        journal: list[_Write] = []
        touched = {i} | {j for j in (self.wiring.before[i], self.wiring.after[i]) if j is not None}
        was_lowered = self._num_lowered[0]
        is_lowered = was_lowered + (self.precision[i] is Precision.FP32) - (precision is Precision.FP32)
        self._write(self._num_lowered, 0, is_lowered, journal)
        if not (was_lowered and is_lowered):
            touched |= set(self.wiring.replaced)
        self._write(self.precision, i, precision, journal)
        changed_outputs = self._propagate_16bit_wants(self.wiring.operands[i], journal)
        changed_values = self._propagate_types([i, *changed_outputs], journal, touched)
        stale = set(self.wiring.operands[i]) | changed_values
        for j in list(touched):
            stale |= {self._offset + j, *self.wiring.operands[j]}
        for value in sorted(stale):
            if self._write(self.casts, value, self._needed_casts(value), journal) or value in changed_values:
                owner = self.wiring.owner(value)
                if owner is not None:
                    touched.add(owner)
        producers = {self.wiring.producer(value) for j in touched for value in self.wiring.operands[j]}
        computed = {follower for j in touched if (follower := self.wiring.epilogue[j]) is not None}
        for j in sorted(touched | producers | computed):
            if j >= 0 and self._write(self._form, j, self._form_of(j), journal):
                touched.add(j)
        return Change(tuple(sorted(touched)), tuple(journal))

    def undo(self, change: Change) -> None:
        """Restore the state before `change`, which must be the latest change not undone."""
        for target, index, old in reversed(change.journal):
            target[index] = old

    def _casts_of(self, value: int) -> list[Cast]:
        entry, source, channels_last = (
            self.wiring.entries[value], self._carried[value], self._channels_last[value],
        )  # fmt: skip
        return [
            Cast(entry.name, source, target, entry.num_elements, entry.kind == "parameter", channels_last)
            for target in self.casts[value]
        ]

    def _lower_everything(self) -> None:
        for value in reversed(range(self.wiring.num_values)):
            self._wanted_16bit[value] = self._wants_16bit(value)
        for i in range(len(self.graph.ops)):
            self._mode[i] = self._mode_of(i)
            self._carried[self._offset + i] = self._output_of(i)
            self._channels_last[self._offset + i] = self._makes_channels_last(i)
        for value in range(self.wiring.num_values):
            self.casts[value] = self._needed_casts(value)
        for i in range(len(self.graph.ops)):
            self._form[i] = self._form_of(i)

    def _taken(self, i: int, j: int) -> str | None:
        traced = self.wiring.traced[self.wiring.operands[i][j]]
        return taken_type(self.graph.ops[i], j, traced, self.precision[i], self._mode[i])

    def _mode_of(self, i: int) -> str:
        floats = [self._carried[value] for value in self.wiring.floats[i]]
        return mode_of(self.graph.ops[i], self.precision[i], floats)

    def _output_of(self, i: int) -> str:
        wanted = self._wanted_16bit[self._offset + i]
        return output_of(self.graph.ops[i], self.precision[i], self._mode[i], self.carried_16bit, wanted)

    def _makes_channels_last(self, i: int) -> bool:
        operands = self.wiring.operands[i]
        first_channels_last = bool(operands) and self._channels_last[operands[0]]
        return makes_channels_last(self.graph.ops[i], self.precision[i], first_channels_last)

    def _computes(self, i: int) -> bool:
        """Return whether operator `i` computes its follower in its epilogue."""
        follower = self.wiring.epilogue[i]
        if follower is None:
            return False
        return computes_follower(self.graph.ops[i], self.precision[i], self._saves_less[follower])

    def _form_of(self, i: int) -> str:
        follower, product = self.wiring.epilogue[i], self.wiring.product[i]
        computed = self.graph.ops[follower].kind if follower is not None and self._computes(i) else None
        is_computed = product is not None and self._computes(product)
        return run_form_of(
            self.graph.ops[i], computed, is_computed, self._saves_less[i],
            lambda: self.wiring.is_saved(self._offset + i, self._taken, self._carried.__getitem__),
        )  # fmt: skip

    def _wants_16bit(self, value: int) -> bool:
        """Return whether every consumer of this value would cast it to at most 16 bits."""
        consumers = self.wiring.consumers[value]
        return bool(consumers) and all(self._casts_to_16bit(i, value) for i in consumers)

    def _casts_to_16bit(self, i: int, value: int) -> bool:
        if self.graph.ops[i].role is Role.ADJUSTABLE:
            operands = self.wiring.operands[i]
            return all(takes_16bit(self._taken(i, j)) for j, v in enumerate(operands) if v == value)
        return self.wiring.passes_16bit_on[i] and self._wanted_16bit[self._offset + i]

    def _needed_casts(self, value: int) -> tuple[str, ...]:
        return needed_casts(
            (
                self._taken(i, j)
                for i in self.wiring.consumers[value]
                for j, operand in enumerate(self.wiring.operands[i])
                if operand == value
            ),
            self._carried[value],
        )

    def _propagate_16bit_wants(self, values: Sequence[int], journal: list[_Write]) -> list[int]:
        """Update upstream which values are wanted in 16 bits; return operators with changed outputs."""
        affected, pending = [], list(values)
        while pending:
            value = pending.pop()
            if (
                self._write(self._wanted_16bit, value, self._wants_16bit(value), journal)
                and value >= self._offset
            ):
                affected.append(value - self._offset)
                pending += self.wiring.operands[value - self._offset]
        return affected

    def _propagate_types(self, start: list[int], journal: list[_Write], touched: set[int]) -> set[int]:
        """Update types downstream from these operators, in execution order; return changed values."""
        changed: set[int] = set()
        reordered_values: set[int] = set()
        heap = sorted(set(start))
        queued = set(heap)
        while heap:
            i = heapq.heappop(heap)
            value = self._offset + i
            mode_changed = self._write(self._mode, i, self._mode_of(i), journal)
            type_changed = self._write(self._carried, value, self._output_of(i), journal)
            order_changed = self._write(self._channels_last, value, self._makes_channels_last(i), journal)
            if mode_changed or not reordered_values.isdisjoint(self.wiring.operands[i]):
                touched.add(i)
            if type_changed:
                changed.add(value)
            if order_changed:
                reordered_values.add(value)
            if type_changed or order_changed:
                touched.add(i)
                for consumer in self.wiring.consumers[value]:
                    if consumer not in queued:
                        queued.add(consumer)
                        heapq.heappush(heap, consumer)
        return changed

    @staticmethod
    def _write(target: list[Any], index: int, new: Any, journal: list[_Write]) -> bool:
        old = target[index]
        if old == new:
            return False
        journal.append((target, index, old))
        target[index] = new
        return True

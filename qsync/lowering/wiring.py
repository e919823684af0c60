"""Wiring of a graph: the readers of each value, as lowering needs them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from qsync.errors import FormatError, MismatchError, shortened
from qsync.lowering.cast_rules import (
    has_epilogue,
    may_be_16bit,
    may_be_cast_for,
    passes_16bit_on,
)
from qsync.operators.declaration import Role
from qsync.operators.precision import LARGEST, Precision
from qsync.operators.registry import FORMS, PRECISIONS_BY_KIND, REPLACED
from qsync.records.graph import Input, Op, OpGraph
from qsync.records.identity_cache import IdentityCache
from qsync.records.save_less import can_save_less


class Wiring:
    """Readers and inputs of all operators and values of a graph, by number.

    Operators are numbered by position. Values are numbered too: graph inputs first, then one per operator.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.ops, self.inputs, self.model = graph.ops, graph.inputs, graph.model
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.entries: tuple[Input | Op, ...] = (*graph.inputs, *graph.ops)  # by number of the value
        self.number = number = {entry.name: i for i, entry in enumerate(self.entries)}
        self.offset = len(graph.inputs)
        self.num_values = len(self.entries)
        self.traced = [entry.dtype for entry in self.entries]
        self.operands = [tuple(number[name] for name in op.inputs) for op in graph.ops]
        self.floats = [
            tuple(value for value in operands if self.traced[value] in LARGEST) for operands in self.operands
        ]
        self.passes_16bit_on: list[bool] = []
        may_16bit = [value.dtype == "bf16" for value in graph.inputs]
        for op, floats in zip(graph.ops, self.floats, strict=True):
            floats_may = [may_16bit[value] for value in dict.fromkeys(floats)]
            self.passes_16bit_on.append(passes_16bit_on(op, floats_may))
            may_16bit.append(may_be_16bit(op, floats_may))
        consumers: list[list[int]] = [[] for _ in self.entries]
        for i, operands in enumerate(self.operands):
            for value in dict.fromkeys(operands):
                consumers[value].append(i)
        self.consumers = consumers
        # anchor[value]: the operator before which a graph input is cast; anchored[i]: inputs cast before i.
        self.anchored: list[list[int]] = [[] for _ in graph.ops]
        self.anchor: list[int | None] = []
        for value in range(self.offset):
            users = [i for i in consumers[value] if may_be_cast_for(graph.ops[i])]
            anchor = next(iter(users or consumers[value]), None)
            self.anchor.append(anchor)
            if anchor is not None:
                self.anchored[anchor].append(value)
        self.replaced = [i for i, op in enumerate(graph.ops) if op.kind in REPLACED]
        # before[i], after[i]: the products before and after product i in execution order.
        self.before: list[int | None] = [None] * len(graph.ops)
        self.after: list[int | None] = [None] * len(graph.ops)
        products = [i for i, op in enumerate(graph.ops) if op.role is Role.ADJUSTABLE and op.flops]
        for i, following in pairwise(products):
            self.after[i], self.before[following] = following, i
        # epilogue[i]: the follower that operator i may compute; product[i]: the product that may compute i.
        self.epilogue: list[int | None] = [None] * len(graph.ops)
        self.product: list[int | None] = [None] * len(graph.ops)
        for i, op in enumerate(graph.ops):
            readers = consumers[self.offset + i]
            if has_epilogue(op, [graph.ops[reader] for reader in readers]):
                self.epilogue[i] = readers[0]
                self.product[readers[0]] = i

    def owner(self, value: int) -> int | None:
        """Return the operator next to which this value's casts run."""
        return self.anchor[value] if value < self.offset else value - self.offset

    def is_view(self, i: int) -> bool:
        """Return whether operator `i` returns a view of its only input."""
        return self.ops[i].kind == "view" and len(set(self.operands[i])) == 1

    def producer(self, value: int) -> int:
        """Return the operator that made this value's storage, through views; negative for graph inputs."""
        i = value - self.offset
        while i >= 0 and self.is_view(i):
            i = self.operands[i][0] - self.offset
        return i

    def storage_readers(self, value: int) -> Iterator[tuple[int, int, int]]:
        """Yield each reader of this value or its views: operator, slot, and value in that slot."""
        for i in self.consumers[value]:
            if self.is_view(i):
                yield from self.storage_readers(self.offset + i)
                continue
            for j, operand in enumerate(self.operands[i]):
                if operand == value:
                    yield i, j, value

    def check(self, name: str, precision: Precision) -> None:
        """Raise MismatchError or FormatError unless the named operator has a kernel in this precision."""
        i = self.position.get(name)
        if i is None or self.ops[i].role is not Role.ADJUSTABLE:
            raise MismatchError(
                f"the graph of {self.model} has no adjustable operator {shortened(name)}; "
                "choose one of graph.adjustable"
            )
        kind = self.ops[i].kind
        if precision not in PRECISIONS_BY_KIND[kind]:
            known = ", ".join(PRECISIONS_BY_KIND[kind])
            raise FormatError(f"{name} ({kind}) has no {precision} kernel; choose one of {known}")

    def check_saving(self, name: str) -> None:
        """Raise MismatchError unless an operator of this name can save less for backward."""
        i = self.position.get(name)
        if i is None or not can_save_less(self.ops[i]):
            raise MismatchError(
                f"the graph of {self.model} has no operator {shortened(name)} that can save less; choose "
                f"following operators of the kinds {', '.join(FORMS)}"
            )


_WIRINGS: IdentityCache[Wiring] = IdentityCache()


def wiring(graph: OpGraph) -> Wiring:
    """Return the wiring of a graph, cached."""
    return _WIRINGS.of(graph, lambda: Wiring(graph))

"""The part of a step's memory that follows from the graph alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from qsync.operators.declaration import Role
from qsync.operators.registry import declared
from qsync.predictor.memory.recomputation import RecomputedBlocks
from qsync.records.graph import Input, Op, OpGraph
from qsync.records.identity_cache import IdentityCache


class Layout:
    """The shapes, types and storages of a graph's values, and the operators that use them."""

    def __init__(self, graph: OpGraph) -> None:
        self.ops = graph.ops
        self.end = 2 * len(graph.ops)
        self.num_calls = graph.num_calls
        entries: list[Input | Op] = [*graph.inputs, *graph.ops]
        self.dtype = {entry.name: entry.dtype for entry in entries}
        self.shape = {entry.name: entry.shape for entry in entries}
        self.elements = {entry.name: entry.num_elements for entry in entries}
        self.has_gradient = {entry.name: entry.requires_grad for entry in entries}
        self.parameters = {value.name for value in graph.parameters}
        self.in_order = {entry.name for entry in entries if entry.channels_last}
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.root = _storage_roots(graph, self.dtype)
        self.users = self._list_users()
        self.product = self._list_products()
        # Value computed by an earlier traced graph -> position of the operator before which it enters.
        self.entered = {v.name: self._entry(v.name) for v in graph.inputs if v.passed_on}
        self.loss_inside = any(declared(op.kind).is_loss for op in graph.ops)
        blocks = graph.recomputed
        self.recomputed = (
            RecomputedBlocks(blocks, len(graph.ops), self.position, self.users) if blocks else None
        )
        # The last time of a step: later than `end` if blocks are recomputed.
        self.last = self.recomputed.end if self.recomputed else self.end

    def _entry(self, value: str) -> int:
        """Return the position of the first operator of the traced graph that reads a value first."""
        first = self.users[value][0] if self.users[value] else 0
        return next((i + 1 for i in reversed(range(first)) if self.ops[i].kind == "output"), 0)

    def is_passed_on(self, value: str, i: int) -> bool:
        """Return whether a later traced graph has an input of this output's shape and type."""
        return self.has_gradient[value] and any(
            entry > i and (self.shape[name], self.dtype[name]) == (self.shape[value], self.dtype[value])
            for name, entry in self.entered.items()
        )

    def _list_products(self) -> list[int]:
        """Return each operator's last product up to it (else the first)."""
        products = [i if op.role is Role.ADJUSTABLE else -1 for i, op in enumerate(self.ops)]
        first = next((i for i in products if i >= 0), 0)
        return [max(first, last) for last in accumulate(products, max)]

    def _list_users(self) -> dict[str, list[int]]:
        """List by storage the operators that compute or read it, views included, in order."""
        users: dict[str, list[int]] = {name: [] for name, root in self.root.items() if name == root}
        for i, op in enumerate(self.ops):
            for root in dict.fromkeys(self.root[name] for name in (op.name, *op.inputs, *op.kept)):
                users[root].append(i)
        return users


_LAYOUTS: IdentityCache[Layout] = IdentityCache()


def layout(graph: OpGraph) -> Layout:
    """Return the cached layout of a graph."""
    return _LAYOUTS.of(graph, lambda: Layout(graph))


def _is_alias(op: Op, dtypes: Mapping[str, str]) -> bool:
    """Return whether the result of an operator shares its input's storage."""
    if op.kind in ("view", "contiguous") and op.copies is not None:
        return not op.copies
    if op.kind in ("view", "input"):
        return len(op.inputs) == 1
    return op.kind == "float" and len(op.inputs) == 1 and dtypes[op.inputs[0]] == op.dtype


def _storage_roots(graph: OpGraph, dtypes: Mapping[str, str]) -> dict[str, str]:
    """Map every value to the value that owns its storage: itself, or the base of a view."""
    root = {value.name: value.name for value in graph.inputs}
    attention = {op.name: op.shape for op in graph.ops if op.kind == "attention" and len(op.shape) == 4}
    for op in graph.ops:
        same = _is_alias(op, dtypes)
        if op.kind == "contiguous" and op.inputs[0] not in attention and root[op.inputs[0]] in attention:
            # Fused attention (B, H, L, D) stores its result in the order (B, L, H, D). Models want that
            # order, so their transpose and `contiguous` make no copy.
            batch, heads, length, width = attention[root[op.inputs[0]]]
            same = op.shape in ((batch, length, heads, width), (batch, length, heads * width))
        root[op.name] = root[op.inputs[0]] if same else op.name
    return root

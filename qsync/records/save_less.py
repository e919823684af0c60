"""Operators of a graph that can save less for backward."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from qsync.operators.declaration import Role
from qsync.operators.registry import declared
from qsync.records.graph import Op, OpGraph


def can_save_less(op: Op) -> bool:
    """Return whether an operator can save smaller tensors for backward."""
    return op.role is Role.FOLLOWING and declared(op.kind).saves_less is not None and op.requires_grad


def ops_that_save_less(graph: OpGraph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the operators that match a pattern and can save less for backward, in order.

    Operators in recomputed blocks are left out: their saved tensors live only briefly.

    >>> ops_that_save_less(graph, ["encoder.layer.0.*"])
    """
    wanted = tuple(patterns)
    twice = {i for first, last in graph.recomputed for i in range(first, last + 1)}
    return tuple(
        op.name
        for i, op in enumerate(graph.ops)
        if i not in twice
        and can_save_less(op)
        and any(fnmatch.fnmatchcase(op.name, pattern) for pattern in wanted)
    )

"""Operators that read one value: they share its cast, so they are raised and lowered together too (ours)."""

from __future__ import annotations

from collections.abc import Mapping

from qsync.records.graph import OpGraph
from qsync.records.precision import Precision


def sibling_groups(graph: OpGraph, choices: Mapping[str, tuple[Precision, ...]]) -> list[tuple[str, ...]]:
    """Operators that read the same value and may be lowered: q, k and v, which share one quantize."""
    readers: dict[str, list[str]] = {}
    for op in graph.adjustable:
        for value in dict.fromkeys(op.inputs):
            if len(choices.get(op.name, ())) > 1:
                readers.setdefault(value, []).append(op.name)
    return list(dict.fromkeys(tuple(group) for group in readers.values() if len(group) > 1))

"""Patterns of operator names that match nothing: what is wrong with them."""

from __future__ import annotations

import difflib
import fnmatch

from qsync.records.graph import OpGraph


def unmatched(graph: OpGraph, pattern: str) -> str:
    """What is wrong with a pattern that matches no adjustable operator, and which one it may have meant."""
    other = next((op for op in graph.ops if fnmatch.fnmatchcase(op.name, pattern)), None)
    if other is not None:
        return (
            f"no adjustable operator of {graph.model} matches {pattern!r}: {other.name} ({other.kind}) is a "
            f"{other.role} one, whose precision is not chosen; leave it out"
        )
    close = difflib.get_close_matches(pattern, [op.name for op in graph.adjustable], n=1, cutoff=0.0)
    nearest = f" (nearest: {close[0]!r})" if close else ""
    return f"no adjustable operator of {graph.model} matches {pattern!r}{nearest}; give a pattern of names"

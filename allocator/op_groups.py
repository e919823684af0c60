"""Groups of operators: with equal precisions on every class, or with a shared cast."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from qsync.errors import FormatError, MismatchError, nearest
from qsync.operators.precision import Precision
from qsync.records.graph import OpGraph

_WILDCARD = re.compile(r"\*|\?|\[!?\]?[^\]]*\]")


def matched_groups(graph: OpGraph, together: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of adjustable operators that patterns put together, each in model order.

    A single pattern groups all matching operators. Several patterns group the names in which their wildcards
    match the same text: ["*.query", "*.key", "*.value"] makes one group per layer. Groups that share an
    operator are merged. Raises MismatchError for a pattern without a match, FormatError for patterns that
    group no two operators.

    >>> matched_groups(graph, [["*.query", "*.key", "*.value"]])
    """
    names = [op.name for op in graph.adjustable]
    leader = {name: name for name in names}

    def first(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for patterns in together:
        found = [group for group in _matched(graph, names, patterns) if len(group) > 1]
        if not found:
            raise FormatError(
                f"{', '.join(patterns)!r} puts no two operators of {graph.model} together; give patterns "
                "whose wildcards stand for the same in all names of a group"
            )
        for group in found:
            roots = sorted({first(name) for name in group}, key=names.index)
            for root in roots[1:]:
                leader[root] = roots[0]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(first(name), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def check_pins(groups: Sequence[Sequence[str]], pinned: Mapping[str, Precision]) -> None:
    """Raise FormatError if operators of one group are pinned to different precisions."""
    for group in groups:
        given = [name for name in group if name in pinned]
        other = next((name for name in given if pinned[name] is not pinned[given[0]]), None)
        if other is not None:
            raise FormatError(
                f"{given[0]} and {other} are to run alike, but are pinned to {pinned[given[0]]} and "
                f"{pinned[other]}; pin them to one precision, or do not put them together"
            )


def _matched(graph: OpGraph, names: Sequence[str], patterns: Sequence[str]) -> list[list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise MismatchError(unmatched(graph, pattern))
        for name in matched:
            key = _stands_for(pattern, name) if len(patterns) > 1 else ()
            groups.setdefault(key, []).append(name)
    return list(groups.values())


def _stands_for(pattern: str, name: str) -> tuple[str, ...]:
    """Return the text that each wildcard of a pattern matches in a name."""
    regex, end = "", 0
    for wildcard in _WILDCARD.finditer(pattern):
        regex += re.escape(pattern[end : wildcard.start()])
        text, end = wildcard.group(), wildcard.end()
        regex += {"*": "(.*?)", "?": "(.)"}.get(text, f"({text.replace('[!', '[^')})")
    found = re.fullmatch(regex + re.escape(pattern[end:]), name)
    return found.groups() if found else (name,)


def unmatched(graph: OpGraph, pattern: str) -> str:
    """Return the error message for a pattern without an adjustable operator, with the nearest name."""
    other = next((op for op in graph.ops if fnmatch.fnmatchcase(op.name, pattern)), None)
    if other is not None:
        return (
            f"no adjustable operator of {graph.model} matches {pattern!r}: {other.name} ({other.kind}) is a "
            f"{other.role} one, whose precision is not chosen; leave it out"
        )
    close = nearest(pattern, [op.name for op in graph.adjustable])
    return f"no adjustable operator of {graph.model} matches {pattern!r}{close}; give a pattern of names"


def sibling_groups(graph: OpGraph, choices: Mapping[str, tuple[Precision, ...]]) -> list[tuple[str, ...]]:
    """Group lowerable operators that read the same value, and so share its cast (as q, k and v)."""
    readers: dict[str, list[str]] = {}
    for op in graph.adjustable:
        for value in dict.fromkeys(op.inputs):
            if len(choices.get(op.name, ())) > 1:
                readers.setdefault(value, []).append(op.name)
    return list(dict.fromkeys(tuple(group) for group in readers.values() if len(group) > 1))

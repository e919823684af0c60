"""Block levers: what each block of a class may do to take less memory, beside its operators' precisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from qsync.errors import FormatError, MismatchError
from qsync.records.graph import OpGraph
from qsync.records.levers import RECOMPUTE, SAVE_LESS, is_in_module
from qsync.records.profiles import Profile
from qsync.records.save_less import ops_that_save_less
from qsync.replayer.costs.class_costs import check_timed
from qsync.replayer.levers.recomputation import numbered, span_of

# The lever of a block, in the order in which it is preferred at equal variance and step.
KEEP, LESS, RECOMPUTED = "keep", "save less", "recompute"
# The lever of every block of a class, in the blocks' order.
Treatment = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a class's graph, and the levers that it may have (`options`, KEEP first).

    `ops` are the positions of its operators, `less` the names of those that save less under LESS, and
    `patterns` the same in a plan's words.
    """

    path: str
    options: tuple[str, ...]
    ops: range
    less: tuple[str, ...]
    patterns: tuple[str, ...]


def block_levers(graph: OpGraph, profile: Profile, levers: Collection[str]) -> tuple[Block, ...]:
    """Return the blocks that may be recomputed or save less, where these are among the levers.

    Blocks are numbered modules (`layers.0`). Operators outside of blocks that can save less are a block of
    their own, without a path. Only operators with measured times of saving less count.

    >>> [block.path for block in block_levers(graph, profile, ["recompute", "save_less"])]
    ['layers.0', 'layers.1', '']
    """
    able = ops_that_save_less(graph, ["*"]) if SAVE_LESS in levers else ()
    timed = [name for name in able if _is_timed(profile, graph, name)]
    paths = numbered(graph)
    found = []
    for path in paths:
        own = tuple(name for name in timed if is_in_module(name, path))
        whole = len(own) == sum(is_in_module(name, path) for name in able)
        span = _span(graph, path) if RECOMPUTE in levers else None
        options = (KEEP, *((LESS,) if own else ()), *((RECOMPUTED,) if span else ()))
        ops = span or range(0)
        found.append(Block(path, options, ops, own, (f"{path}.*",) if whole else own))
    outside = tuple(name for name in timed if not any(is_in_module(name, path) for path in paths))
    if outside:
        patterns = ("*",) if not paths and len(outside) == len(able) else outside
        found.append(Block("", (KEEP, LESS), range(0), outside, patterns))
    return tuple(block for block in found if len(block.options) > 1)


def blocks_with(blocks: Iterable[Block], treatment: Treatment, lever: str) -> Iterator[Block]:
    """Yield the blocks that have this lever."""
    return (block for block, own in zip(blocks, treatment, strict=True) if own == lever)


def _span(graph: OpGraph, path: str) -> range | None:
    """Return the positions of a block's operators; None if it cannot be recomputed."""
    try:
        first, last = span_of(graph, path)
    except FormatError:
        return None
    return range(first, last + 1)


def _is_timed(profile: Profile, graph: OpGraph, name: str) -> bool:
    try:
        check_timed(profile, graph, name)
    except MismatchError:
        return False
    return True

"""How many of a class's operators may save less for backward: what a search goes through, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from qsync.errors import MismatchError
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.records.save_less import ops_that_save_less
from qsync.replayer.costs import check_timed
from qsync.replayer.levers.recomputation import numbered

Patterns = tuple[str, ...]


def savings(graph: OpGraph, profile: Profile) -> tuple[Patterns, ...]:
    """Patterns of what saves less, from nothing through one block more each time to all that the profile has
    timed so; nothing alone where it has timed none.

    A model without blocks has none and all. The first blocks come first: what they keep waits longest.

    >>> savings(graph, profile)
    ((), ('layer.0.*',), ('layer.0.*', 'layer.1.*'), ('*',))
    """
    able = ops_that_save_less(graph, ["*"])
    timed = {name for name in able if _is_timed(profile, graph, name)}

    def named(pattern: str, own: Sequence[str]) -> Patterns:
        return (pattern,) if timed.issuperset(own) else tuple(name for name in own if name in timed)

    found, outside = list[Patterns]([()]), list(able)
    for path in numbered(graph):
        own = [name for name in able if name.startswith(f"{path}.")]
        if timed.intersection(own):
            found.append((*found[-1], *named(f"{path}.*", own)))
            outside = [name for name in outside if name not in own]
    rest = tuple(name for name in outside if name in timed)
    if not timed.issuperset(able):
        return (*found, (*found[-1], *rest)) if rest else tuple(found)
    return (*(found if rest else found[:-1]), ("*",)) if timed else ((),)


def _is_timed(profile: Profile, graph: OpGraph, name: str) -> bool:
    try:
        check_timed(profile, graph, name)
    except MismatchError:
        return False
    return True

"""Steps of saving less: growing sets of operators that save less for backward, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from qsync.errors import MismatchError
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.records.save_less import ops_that_save_less
from qsync.replayer.costs.class_costs import check_timed
from qsync.replayer.levers.recomputation import numbered

Patterns = tuple[str, ...]


def save_less_steps(graph: OpGraph, profile: Profile) -> tuple[Patterns, ...]:
    """Return growing patterns of operators that save less: none, one more block at a time, all.

    Only operators with measured times of saving less count; without any there is one empty step. A model
    without blocks has two steps, none and all. Early blocks come first: their saved tensors live longest.

    >>> save_less_steps(graph, profile)
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

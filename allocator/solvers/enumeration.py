"""Where a class has few assignments, all of them are tried: nothing is left to chance there (ours)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from qsync.allocator.solvers.recovery import holds
from qsync.allocator.state import State
from qsync.records.precision import Precision

Assignment = dict[str, Precision]

# So many take less time than a search would.
_FEW = 1000


def every_assignment(state: State, device_class: str) -> list[Assignment]:
    """All assignments of a class, or none if there are too many to try."""
    choices = state.classes[device_class].part.choices
    if math.prod(len(options) for options in choices.values()) > _FEW:
        return []
    return [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]


def fastest_that_fits(state: State, device_class: str) -> bool:
    """Bring a class to the fastest of all its assignments that fit in its memory; whether one was found."""
    one, found = state.classes[device_class], []
    for number, assignment in enumerate(every := every_assignment(state, device_class)):
        state.move(device_class, assignment)
        if one.fits():
            found.append((one.costs.total_s, number))
    if found:
        state.move(device_class, every[min(found)[1]])
    return bool(found)


def least_of_all(state: State, classes: Sequence[str], target_s: float) -> bool:
    """Bring each class to the one that adds least variance of all that hold, the others as they are; whether
    any was better than what stood.
    """
    changed = False
    for name in classes:
        variance = state.classes[name].part.variance
        added = [
            (sum(variance[op][p] for op, p in assignment.items()), number, assignment)
            for number, assignment in enumerate(every_assignment(state, name))
        ]
        now = state.classes[name].variance
        for more, _, assignment in sorted(added, key=lambda entry: entry[:2]):
            if more >= now:
                break
            move = state.move(name, assignment)
            if holds(state, target_s):
                changed = True
                break
            state.back(move)
    return changed

"""Plans to compare with: operators in one simple order, raised or lowered until the target binds.

Each function changes a `State` as the solvers do, and asks the same replay whether step and memory hold; what
they leave out is what the solvers know: what a second is worth, neighbours that share a cast, exchanges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from qsync.allocator.solvers.recovery import holds, is_raise
from qsync.allocator.state import State
from qsync.records.precision import Precision
from qsync.replayer import step_time


def raise_by_variance(state: State, classes: Sequence[str], target_s: float) -> None:
    """Sensitivity alone: from what `state` has, raise operators by the variance they add, largest first.

    Each goes to the highest precision with which the step is within `target_s` seconds and memory holds,
    whatever time that takes from those that come after it; one pass.
    """
    added = [
        (-variance[state.classes[name].precision(op)], number, name, op)
        for name in classes
        for number, (op, variance) in enumerate(state.classes[name].part.variance.items())
    ]
    for _, _, name, op in sorted(added):
        for precision in reversed(state.classes[name].part.choices[op]):
            if is_raise(state, name, op, precision) and _kept(state, name, op, precision, target_s):
                break


def raise_at_random(state: State, classes: Sequence[str], target_s: float, seed: int) -> None:
    """From what `state` has, try every precision of every operator in an order drawn from `seed`; one pass.

    A raise stays if the step is within `target_s` seconds and memory holds, so the result is a random
    assignment to which little can be added.
    """
    tries = [
        (name, op, precision)
        for name in classes
        for op, options in state.classes[name].part.choices.items()
        for precision in options
    ]
    random.Random(seed).shuffle(tries)
    for name, op, precision in tries:
        if is_raise(state, name, op, precision):
            _kept(state, name, op, precision, target_s)


def lower_by_time(state: State, classes: Sequence[str], target_s: float) -> bool:
    """Latency alone: from the highest precisions, lower operators by the seconds that each saves, most first.

    Each gets its own fastest precision among its neighbours as they are, whatever variance that adds, until
    the step is within `target_s` seconds; only in classes that are late beside those that are never lowered.
    Orders are taken again until nothing saves time. Whether step and memory hold in the end.
    """
    for name in classes:
        state.move(name, state.classes[name].part.highest)
    progress = True
    while progress and not holds(state, target_s):
        progress = False
        late = [name for name in classes if _alone_s(state, name, classes) > target_s] or list(classes)
        found = [entry for name in late for entry in _savings(state, name)]
        for _, _, name, op, precision in sorted(found):
            if holds(state, target_s):
                return True
            one = state.classes[name]
            if len(late) > 1 and _alone_s(state, name, classes) <= target_s:
                continue
            before, move = one.costs.total_s, state.move(name, {op: precision})
            if one.costs.total_s < before:
                progress = True
            else:
                state.back(move)
    return holds(state, target_s)


def _kept(state: State, name: str, op: str, precision: Precision, target_s: float) -> bool:
    move = state.move(name, {op: precision})
    if holds(state, target_s):
        return True
    state.back(move)
    return False


def _alone_s(state: State, name: str, classes: Sequence[str]) -> float:
    """Seconds of the step if of all classes that may be lowered only this one took part."""
    works = [one.work for other, one in state.classes.items() if other == name or other not in classes]
    return step_time(works, state.problem.exchange)


def _savings(state: State, name: str) -> list[tuple[float, int, str, str, Precision]]:
    """For each operator the precision that saves most seconds now, keyed so that the best sorts first."""
    one, found = state.classes[name], []
    now = one.costs.total_s
    for number, (op, options) in enumerate(one.part.choices.items()):
        tried = []
        for precision in options:
            move = state.move(name, {op: precision})
            tried.append((one.costs.total_s - now, number, name, op, precision))
            state.back(move)
        if min(tried)[0] < 0.0:
            found.append(min(tried))
    return found

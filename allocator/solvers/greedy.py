"""The fast solver: QSync's recovery, from several starts and in two orders."""

from __future__ import annotations

from collections.abc import Iterator

from qsync.allocator.search_state import State
from qsync.allocator.solvers.fastest_start import uniform_starts
from qsync.allocator.solvers.precision_recovery import PRIORITIES, holds, recover
from qsync.records.precision import Precision

Assignments = dict[str, dict[str, Precision]]

# With more free operators than this, summed over classes, recovery has time for one start only.
_MAX_OPS_FOR_ALL_STARTS = 400


def greedy(state: State, lowerable: list[str], target_s: float) -> None:
    """Raise the weak classes, which stand at their fastest, as far as time and memory allow.

    Recover from every start that reaches the target, in every order, and keep the result of least variance,
    the first of equals. Beside the fastest start every uniform assignment is a start, so the plan never adds
    more variance than the best uniform choice that is fast enough. With too many operators for all starts,
    use one start and one order.
    """
    best, least = state.assignments(), state.variance
    few = sum(len(state.problem.classes[name].choices) for name in lowerable) <= _MAX_OPS_FOR_ALL_STARTS
    for start in list(_starts(state, lowerable))[: None if few else 1]:
        for priority in PRIORITIES if few else PRIORITIES[-1:]:
            state.restore(start)
            if not holds(state, target_s):
                break
            recover(state, lowerable, target_s, priority)
            if state.variance < least:
                best, least = state.assignments(), state.variance
    state.restore(best)


def _starts(state: State, lowerable: list[str]) -> Iterator[Assignments]:
    """Yield the present assignments, then every uniform precision on all weak classes at once."""
    fastest = state.assignments()
    yield fastest
    uniform = {name: list(uniform_starts(state, name)) for name in lowerable}
    for number in range(max((len(starts) for starts in uniform.values()), default=0)):
        yield {**fastest, **{name: starts[min(number, len(starts) - 1)] for name, starts in uniform.items()}}

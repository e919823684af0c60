"""The fast solver: recovery from a few starts, in two orders, and exchanges (QSync's stages, extended)."""

from __future__ import annotations

from collections.abc import Iterator

from qsync.allocator.solvers.enumeration import least_of_all
from qsync.allocator.solvers.exchanges import exchange
from qsync.allocator.solvers.fastest_start import uniform_starts
from qsync.allocator.solvers.recovery import PRIORITIES, holds, recover
from qsync.allocator.state import State
from qsync.records.precision import Precision

Assignments = dict[str, dict[str, Precision]]

# With more operators to choose for than this, counted class by class, recovery has time for one start only.
_MANY = 400
# Exchanges and recovery take turns so often at the most.
_MAX_EXCHANGES = 4


def greedy(state: State, lowerable: list[str], target_s: float) -> None:
    """Raise the weak classes, which stand at their fastest, as far as time and memory allow.

    Recovery from every start that reaches the target and in every order, of which the one that adds least
    variance stands, the first of equals; then exchanges. Beside the fastest start every uniform assignment is
    a start, so the plan never adds more variance than the best uniform choice that is fast enough (ours).
    With too many operators for that, one start and one order. A class with few assignments tries them all.
    """
    best, least = state.assignments(), state.variance
    few = sum(len(state.problem.classes[name].choices) for name in lowerable) <= _MANY
    for start in list(_starts(state, lowerable))[: None if few else 1]:
        for priority in PRIORITIES if few else PRIORITIES[-1:]:
            state.restore(start)
            if not holds(state, target_s):
                break
            recover(state, lowerable, target_s, priority)
            if state.variance < least:
                best, least = state.assignments(), state.variance
    state.restore(best)
    for _ in range(_MAX_EXCHANGES if few else 1):
        if not exchange(state, lowerable, target_s):
            break
        recover(state, lowerable, target_s, PRIORITIES[-1])
    least_of_all(state, lowerable, target_s)


def _starts(state: State, lowerable: list[str]) -> Iterator[Assignments]:
    """The state as it is, then every precision that some weak class may have, on all of these at once."""
    fastest = state.assignments()
    yield fastest
    uniform = {name: list(uniform_starts(state, name)) for name in lowerable}
    for number in range(max((len(starts) for starts in uniform.values()), default=0)):
        yield {**fastest, **{name: starts[min(number, len(starts) - 1)] for name, starts in uniform.items()}}

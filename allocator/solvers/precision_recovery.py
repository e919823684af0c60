"""Stage 2: raise operators while the step and the memory hold (QSync, arXiv:2407.02327, second stage)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.search_state import Move, State
from qsync.records.precision import PRECISION_ORDER, Precision
from qsync.replayer import least_time

# Operators of one class that are raised together, with their precisions.
Raise = Mapping[str, Precision]
# The order of raises, from the variance regained and the part of the slack used: larger is earlier.
Priority = Callable[[float, float], float]

# Replay sums floats, so two orders of the same sum may differ in the last bits.
TOLERANCE = 1e-9
# The slack counts as at least this part of the target, or of the memory budget.
_MIN_SLACK_PART = 1e-3
_MAX_REPLAYED_AT_ONCE = 1024


def variance_regained(regained: float, used: float) -> float:
    """Return (n_c / N^2) (omega[now] - omega[higher]): QSync's order."""
    return regained


def regained_per_slack(regained: float, used: float) -> float:
    """Return the variance regained per part of the slack that a raise uses, in time and memory.

    This is a knapsack's density (Toyoda, Management Science 1975, for several constraints).
    """
    return regained / max(used, 1e-9)


PRIORITIES: tuple[Priority, ...] = (variance_regained, regained_per_slack)


def recover(state: State, classes: Sequence[str], target_s: float, priority: Priority) -> None:
    """Raise operators of these classes, best first, while the step is within `target_s` and memory holds.

    Every raise of an operator is tried, so an operator that cannot afford FP32 may still be raised half way.
    A raise that does not hold is undone exactly. Operators that read one value are also raised together: the
    first one raised alone would pay for a cast that the others still need. The worth of a raise is computed
    again when its turn comes, since earlier raises have changed it. Raising a neighbour can remove a cast and
    make a rejected raise affordable, so passes are repeated until one changes nothing.
    """
    for name in classes:
        one, trial = state.classes[name], _Trial(state, target_s)
        if one.seconds_at(one.part.highest) - one.costs.total_s <= trial.slack_s(name):
            trial.add(state.move(name, one.part.highest))
            trial.settle()
    while _pass(state, classes, target_s, priority):
        pass


def holds(state: State, target_s: float) -> bool:
    """Return whether the step is within the target, margins included, and every class fits in memory."""
    most = target_s * (1 + TOLERANCE)
    if any(one.alone_s * state.late_factor(name) > most for name, one in state.classes.items()):
        return False
    if any(seconds > most for seconds in _least_times(state).values()):
        return False
    return state.late_step_s() <= most and all(one.fits() for one in state.classes.values())


def _least_times(state: State) -> dict[str, float]:
    """Return by class a lower bound of the step's seconds, margins included."""
    exchange = state.problem.exchange
    return {
        name: least_time(work, start_s, exchange) for name, (work, start_s) in state.late_starts().items()
    }


def is_raise(state: State, device_class: str, op: str, precision: Precision) -> bool:
    """Return whether a precision adds less variance than the present one, or as much and ranks higher."""
    one = state.classes[device_class]
    variance, now = one.part.variance[op], one.precision(op)
    return (variance[precision], -PRECISION_ORDER[precision]) < (variance[now], -PRECISION_ORDER[now])


def _pass(state: State, classes: Sequence[str], target_s: float, priority: Priority) -> bool:
    """Try every raise once, best first; return whether any held."""
    structure = {name: state.classes[name].structural_classes() for name in classes}
    trial = _Trial(state, target_s)
    slack_s = {name: max(trial.slack_s(name), _MIN_SLACK_PART * target_s) for name in classes}
    memory: dict[int, float] = {}
    heap: list[tuple[float, int, str, Raise, float]] = []

    def worth(number: int, name: str, regained: float, lost_s: float) -> float:
        return priority(regained, lost_s / slack_s[name] + memory[number])

    for number, (name, raised) in enumerate(_raises(state, classes)):
        lost_s = state.seconds_of(name, raised, structure[name])
        memory[number] = _memory_used(state, name, raised)
        now = worth(number, name, -state.classes[name].added_by(raised), lost_s)
        # The number makes ties deterministic: class order, then model order, then the highest first.
        heap.append((-now, number, name, raised, lost_s))
    heapq.heapify(heap)
    while heap:
        _, number, name, raised, lost_s = heapq.heappop(heap)
        one = state.classes[name]
        still = {op: precision for op, precision in raised.items() if is_raise(state, name, op, precision)}
        is_launched = one.costs.launches is not None  # then what kernels lose may cost no step
        if not still or (not is_launched and lost_s > 2 * max(trial.slack_s(name), 0.0)):
            continue
        regained, before = -one.added_by(still), one.costs.total_s
        following = -heap[0][0] * (1 - TOLERANCE) if heap else 0.0
        now = worth(number, name, regained, lost_s)
        if now < following:  # other raises come before it
            heapq.heappush(heap, (-now, number, name, still, lost_s))
            continue
        move = state.move(name, still)
        lost_s = one.costs.total_s - before
        now = worth(number, name, regained, lost_s)
        if now < following:
            state.back(move)
            heapq.heappush(heap, (-now, number, name, still, lost_s))
        elif trial.may_hold(name):
            trial.add(move)
        else:
            state.back(move)
    return trial.settle()


def _memory_used(state: State, name: str, raised: Raise) -> float:
    """Return the part of the memory slack that a raise uses; 0 where FP32 fits."""
    one = state.classes[name]
    if not one.is_tight:
        return 0.0
    now = one.peak_bytes
    slack = max(one.part.budget_bytes - now, _MIN_SLACK_PART * one.part.budget_bytes)
    move = state.move(name, raised)
    used = (one.peak_bytes - now) / slack
    state.back(move)
    return used


class _Trial:
    """Moves that wait for replay: more and more at once while all hold, one at a time after a failure."""

    def __init__(self, state: State, target_s: float) -> None:
        self._state, self._target_s = state, target_s
        self._pending: list[Move] = []
        self._at_once, self._any_held = 1, False
        # By class: lower bound of the step's seconds beyond the class's own step, when last measured.
        self._beyond_own_s: dict[str, float] = {}
        self._measure()

    def slack_s(self, name: str) -> float:
        """Return the seconds that a class may still lose, as far as is known."""
        late = self._state.late_factor(name)
        alone_s = self._state.classes[name].alone_s
        return self._target_s * (1 + TOLERANCE) / late - alone_s - self._beyond_own_s[name]

    def may_hold(self, name: str) -> bool:
        """Return whether the target is still possible for this class as it stands."""
        if self.slack_s(name) < 0.0:
            self._measure()
        return self.slack_s(name) >= 0.0

    def add(self, move: Move) -> None:
        """Add a move that was just made."""
        if move.changes:
            self._pending.append(move)
        if len(self._pending) >= self._at_once:
            self.settle()

    def settle(self) -> bool:
        """Undo the moves that do not hold; return whether any ever held."""
        moves, self._pending = self._pending, []
        if moves:
            self._settle(moves)
        return self._any_held

    def _settle(self, moves: list[Move]) -> None:
        """Keep those of the last moves that hold, earlier ones first."""
        if holds(self._state, self._target_s):
            self._any_held = True
            self._at_once = min(2 * self._at_once, _MAX_REPLAYED_AT_ONCE)
            return
        self._at_once = 1
        self._measure()
        for move in reversed(moves):
            self._state.back(move)
        if len(moves) == 1:
            return
        middle = len(moves) // 2
        for half in (moves[:middle], moves[middle:]):
            self._settle([self._state.move(move.device_class, move.assignment) for move in half])

    def _measure(self) -> None:
        for name, least_s in _least_times(self._state).items():
            late = self._state.late_factor(name)
            self._beyond_own_s[name] = least_s / late - self._state.classes[name].alone_s


def _raises(state: State, classes: Sequence[str]) -> Iterator[tuple[str, Raise]]:
    for name in classes:
        choices = state.classes[name].part.choices
        for op, options in choices.items():
            for precision in reversed(options):
                if is_raise(state, name, op, precision):
                    yield name, {op: precision}
        for group in sibling_groups(state.problem.graph, choices):
            for precision in reversed(choices[group[0]]):
                able = [
                    op for op in group if precision in choices[op] and is_raise(state, name, op, precision)
                ]
                if len(able) > 1:
                    yield name, dict.fromkeys(able, precision)

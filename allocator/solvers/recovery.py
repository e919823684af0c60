"""Stage 2: raise operators while the step and the memory hold (QSync, arXiv:2407.02327, second stage)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.problem import RANK
from qsync.allocator.state import Move, State
from qsync.records.precision import Precision
from qsync.replayer import least_time, starts_s

# Operators of one class that are raised together, with their precisions.
Raise = Mapping[str, Precision]
# The order in which raises are tried, of the variance regained and the part used of what there is room for:
# larger is earlier.
Priority = Callable[[float, float], float]

# Replay sums floats, so two orders of the same sum may differ in the last bits.
TOLERANCE = 1e-9
# Where there is no room, what a raise takes is measured against this part of the whole.
_LEAST_ROOM = 1e-3
# So many raises are replayed together at the most.
_MOST_AT_ONCE = 1024


def variance_regained(regained: float, used: float) -> float:
    """(n_c / N^2) (omega[now] - omega[higher]): QSync's order."""
    return regained


def regained_per_room(regained: float, used: float) -> float:
    """Variance regained per part of the room in time and memory that it takes: a knapsack's density (Toyoda,
    Management Science 1975, for several constraints).
    """
    return regained / max(used, 1e-9)


PRIORITIES: tuple[Priority, ...] = (variance_regained, regained_per_room)


def recover(state: State, classes: Sequence[str], target_s: float, priority: Priority) -> None:
    """Raise operators of these classes, best first, while the step is within `target_s` and memory holds.

    Every raise of an operator is tried, so one whose jump to FP32 costs too much may still stop half way; a
    raise that does not hold is undone exactly. Operators that read one value are also raised together: alone
    the first of them would pay for a cast that the others still need. What a raise is worth is looked at
    again when its turn comes, for the raises before it have changed that (ours). Raising a neighbour can
    remove a cast and make a refused raise affordable, so passes are repeated until one changes nothing.
    """
    for name in classes:
        one, trial = state.classes[name], _Trial(state, target_s)
        if one.seconds_at(one.part.highest) - one.costs.total_s <= trial.room_s(name):
            trial.add(state.move(name, one.part.highest))
            trial.settle()
    while _pass(state, classes, target_s, priority):
        pass


def holds(state: State, target_s: float) -> bool:
    """Whether the step is within the target, late classes included, and every class within its memory."""
    most = target_s * (1 + TOLERANCE)
    if any(one.alone_s * (1 + state.late.get(name, 0.0)) > most for name, one in state.classes.items()):
        return False
    if any(seconds > most for seconds in _least_times(state).values()):
        return False
    return state.late_step_s() <= most and all(one.fits() for one in state.classes.values())


def _least_times(state: State) -> dict[str, float]:
    """By class the seconds that a step takes at the least, late classes included."""
    exchange = state.problem.exchange
    works = {name: one.work.slower(1 + state.late.get(name, 0.0)) for name, one in state.classes.items()}
    starts = starts_s(list(works.values()), exchange)
    return {
        name: least_time(work, start_s, exchange)
        for (name, work), start_s in zip(works.items(), starts, strict=True)
    }


def is_raise(state: State, device_class: str, op: str, precision: Precision) -> bool:
    """Whether this precision adds less variance than the operator's own, or as much and is called higher."""
    one = state.classes[device_class]
    variance, now = one.part.variance[op], one.precision(op)
    return (variance[precision], -RANK[precision]) < (variance[now], -RANK[now])


def _pass(state: State, classes: Sequence[str], target_s: float, priority: Priority) -> bool:
    places = {name: state.classes[name].places() for name in classes}
    trial = _Trial(state, target_s)
    room_s = {name: max(trial.room_s(name), _LEAST_ROOM * target_s) for name in classes}
    memory, heap = {}, []
    for number, (name, raised) in enumerate(_raises(state, classes)):
        lost_s, memory[number] = (
            state.seconds_of(name, raised, places[name]),
            _memory_used(state, name, raised),
        )
        used = lost_s / room_s[name] + memory[number]
        # The number makes ties deterministic: class order, then model order, then the highest first.
        heap.append((-priority(_regained(state, name, raised), used), number, name, raised, lost_s))
    heapq.heapify(heap)
    while heap:
        _, number, name, raised, lost_s = heapq.heappop(heap)
        one = state.classes[name]
        still = {op: precision for op, precision in raised.items() if is_raise(state, name, op, precision)}
        if not still or lost_s > 2 * max(trial.room_s(name), 0.0):
            continue
        regained, before = _regained(state, name, still), one.costs.total_s
        following = -heap[0][0] * (1 - TOLERANCE) if heap else 0.0
        now = priority(regained, lost_s / room_s[name] + memory[number])
        if now < following:  # its turn comes later
            heapq.heappush(heap, (-now, number, name, still, lost_s))
            continue
        move = state.move(name, still)
        lost_s = one.costs.total_s - before
        now = priority(regained, lost_s / room_s[name] + memory[number])
        if now < following:
            state.back(move)
            heapq.heappush(heap, (-now, number, name, still, lost_s))
        elif trial.may_hold(name):
            trial.add(move)
        else:
            state.back(move)
    return trial.settle()


def _regained(state: State, device_class: str, raised: Raise) -> float:
    one = state.classes[device_class]
    return sum(
        one.part.variance[op][one.precision(op)] - one.part.variance[op][p] for op, p in raised.items()
    )


def _memory_used(state: State, name: str, raised: Raise) -> float:
    """The part of the room in memory that a raise takes, where FP32 would not fit; else 0."""
    one = state.classes[name]
    if not one.is_tight:
        return 0.0
    now = one.peak_bytes
    room = max(one.part.budget_bytes - now, _LEAST_ROOM * one.part.budget_bytes)
    move = state.move(name, raised)
    used = (one.peak_bytes - now) / room
    state.back(move)
    return used


class _Trial:
    """Moves that are made before replay says whether they hold: as many at once as have held so far."""

    def __init__(self, state: State, target_s: float) -> None:
        self._state, self._target_s = state, target_s
        self._pending: list[Move] = []
        self._at_once, self._any_held = 1, False
        # By class: how much longer than its own step a step was at the least, when that was last looked at.
        self._longer_s: dict[str, float] = {}
        self._look()

    def room_s(self, name: str) -> float:
        """Seconds that a class may still lose, as far as is known."""
        late = 1 + self._state.late.get(name, 0.0)
        alone_s = self._state.classes[name].alone_s
        return self._target_s * (1 + TOLERANCE) / late - alone_s - self._longer_s[name]

    def may_hold(self, name: str) -> bool:
        """Whether the step of this class, as it is now, does not rule the target out."""
        if self.room_s(name) < 0.0:
            self._look()
        return self.room_s(name) >= 0.0

    def add(self, move: Move) -> None:
        """A move that was just made."""
        if move.changes:
            self._pending.append(move)
        if len(self._pending) >= self._at_once:
            self.settle()

    def settle(self) -> bool:
        """Undo what does not hold; whether anything ever did."""
        moves, self._pending = self._pending, []
        if moves:
            self._settle(moves)
        return self._any_held

    def _settle(self, moves: list[Move]) -> None:
        """Keep those of some moves, the last ones made, that hold, the first ones first."""
        if holds(self._state, self._target_s):
            self._any_held = True
            self._at_once = min(2 * self._at_once, _MOST_AT_ONCE)
            return
        self._at_once = 1
        self._look()
        for move in reversed(moves):
            self._state.back(move)
        if len(moves) == 1:
            return
        middle = len(moves) // 2
        for half in (moves[:middle], moves[middle:]):
            self._settle([self._state.move(move.device_class, move.assignment) for move in half])

    def _look(self) -> None:
        for name, least_s in _least_times(self._state).items():
            late = 1 + self._state.late.get(name, 0.0)
            self._longer_s[name] = least_s / late - self._state.classes[name].alone_s


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

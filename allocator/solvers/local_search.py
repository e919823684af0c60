"""Local search: change a window of neighbouring operators, and compensate for it in other windows.

A cast depends on both of its ends. The cost of changing several neighbours is therefore not the sum of the
costs of changing each: a change of q and k together may save a cast that neither saves alone. A window is an
operator with as many of its nearest neighbours as leave few enough assignments to price them all.

One move has one change of a window that lessens the variance, and the compensating changes of other
windows. An exchange adds compensating changes one by one and replays each. Where no exchange holds,
changes are combined by their prices alone, so that they cover the deficit of seconds and bytes at least
variance.
Replay decides whether a move stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync.allocator.search_state import ClassState, State
from qsync.allocator.solvers.precision_recovery import TOLERANCE, holds
from qsync.lowering.wiring import Wiring, wiring
from qsync.records.precision import Precision
from qsync.replayer import least_time

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Assignments priced per window, and per class and round: windows are small where there are many operators.
_MAX_PRICED_PER_WINDOW, _MAX_PRICED_PER_CLASS = 500, 12_000
# Where memory binds, pricing an assignment takes about this many times as long.
_MEMORY_PRICING_FACTOR = 2
# Sizes of the windows, searched in turn, and how many values away a window's operators are from its first.
_WINDOW_SIZES, _MAX_DISTANCE = (1, 3, 8), 6
# A value read by more operators than this (a mask that every block reads) does not make them neighbours.
_MAX_READERS = 8
# A window is left out if other windows hold its first operator beside this many of its nearest neighbours.
_NUM_NEAREST = 3
# Gains (changes that lessen the variance) that are compensated for, and compensating changes per gain.
_MAX_GAINS, _MAX_COMPENSATING = 2000, 12
_MAX_REPLAYED_PER_ROUND, _MAX_ROUNDS = 64, 20
# Exchanges: gains tried in a round, compensating changes of each, and the factor by which these may save more
# together than alone.
_MAX_EXCHANGED, _MAX_LOWERED, _SAVED_TOGETHER = 16, 32, 2.0
# A move must lessen the variance of its class by this part.
_MIN_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to combine, sorted by variance.

    Row i changes the operators `of[i]`, adds `variance[i]` and uses `uses[i]` of each slack (seconds, and
    bytes at some times of the step); a negative use saves.
    """

    of: BoolArray
    variance: FloatArray
    uses: FloatArray


def improve(state: State, classes: Sequence[str], target_s: float, enough: float = 0.0) -> bool:
    """Make moves that lessen the variance until none is found or the variance is at most `enough`.

    `state` must hold and still holds afterwards. Single operators come first, which are cheap to price, then
    larger windows. Counts bound the work of a round, never the clock. Returns whether any move was made.

    >>> improve(state, ["infer"], target_s=0.1)
    """
    improved = False
    if state.variance > enough:
        neighbours = {name: list(_neighbours(state.classes[name])) for name in classes}
        for size, name in itertools.product(_WINDOW_SIZES, classes):
            windows = [ops[:size] for ops in neighbours[name]]
            improved |= _improve_class(state, name, windows, target_s, enough)
    return improved


def _improve_class(
    state: State, name: str, windows: Sequence[Sequence[str]], target_s: float, enough: float
) -> bool:
    """Make moves of one class until none is found or the variance is at most `enough`."""
    one, improved = state.classes[name], False
    counts_bytes = one.is_tight
    for _ in range(_MAX_ROUNDS if windows else 0):
        if one.variance == 0.0 or state.variance <= enough:
            break
        search = Round(state, name, windows, target_s, counts_bytes)
        if search.exchange() or search.move():
            improved = True
        elif search.missed_memory and not counts_bytes:
            counts_bytes = True  # FP32 fits in memory, but an assignment whose casts are saved needs more
        else:
            break
    return improved


def combine(changes: Changes, slack: FloatArray, least: float) -> list[tuple[float, tuple[int, ...]]]:
    """Return the moves that fit in `slack` as (variance added, rows), least variance first.

    A move changes no operator twice and lessens the variance by more than `least`.

    >>> combine(Changes(of, np.array([-3.0, 1.0]), np.array([[2.0], [-2.0]])), np.zeros(1), 0.0)
    [(-2.0, (0, 1))]
    """
    found: set[tuple[float, tuple[int, ...]]] = set()
    for gain in range(min(len(changes.variance), _MAX_GAINS)):
        if changes.variance[gain] >= -least:
            break
        found |= _compensated(changes, gain, slack, least)
    return sorted(found)


def _compensated(
    changes: Changes, gain: int, slack: FloatArray, least: float
) -> set[tuple[float, tuple[int, ...]]]:
    """Return the moves around one gain.

    Compensating changes are added one by one, each the cheapest per part of the deficit that it covers. After
    each addition, also find the single change that covers the remaining deficit at least variance.
    """
    found, rows = set(), [gain]
    variance, used, of = float(changes.variance[gain]), changes.uses[gain], changes.of[gain]
    for _ in range(_MAX_COMPENSATING):
        deficit = np.maximum(used - slack, 0.0)
        if not deficit.any():
            found.add((variance, tuple(sorted(rows))))
        able = ~changes.of[:, of].any(axis=1) & (changes.variance < -least - variance)
        last = able & (changes.uses <= slack - used).all(axis=1)
        if last.any():
            row = int(np.argmin(np.where(last, changes.variance, np.inf)))
            found.add((variance + float(changes.variance[row]), tuple(sorted([*rows, row]))))
        if not deficit.any():
            break
        lacking = deficit > 0.0
        covered = np.minimum(-changes.uses[:, lacking], deficit[lacking]).sum(axis=1) / deficit.sum()
        able &= covered > 0.0
        if not able.any():
            break
        price = np.maximum(changes.variance, 0.0) / np.where(able, covered, 1.0)
        row = int(np.argmin(np.where(able, price, np.inf)))
        rows.append(row)
        variance += float(changes.variance[row])
        used, of = used + changes.uses[row], of | changes.of[row]
    return found


def _neighbours(one: ClassState) -> Iterator[list[str]]:
    """Yield each operator that has a choice, followed by neighbours that have a choice, nearest first."""
    ops, wired = one.part.graph.ops, wiring(one.part.graph)
    free = {i for i, op in enumerate(ops) if len(one.part.choices.get(op.name, ())) > 1}
    for i in sorted(free):
        found, front = [i], [wired.offset + i]
        seen = set(front)
        for _ in range(_MAX_DISTANCE):
            adjacent = [value for at in front for value in _adjacent(wired, at)]
            front = [value for value in dict.fromkeys(adjacent) if value not in seen]
            seen.update(front)
            found += [value - wired.offset for value in front if value - wired.offset in free]
        yield [ops[j].name for j in found[: _WINDOW_SIZES[-1]]]


def _adjacent(wired: Wiring, value: int) -> list[int]:
    """Return the results of a value's readers and the operands of its maker, as value numbers."""
    readers = wired.consumers[value]
    down = [wired.offset + i for i in readers] if len(readers) <= _MAX_READERS else []
    return down + (list(wired.operands[value - wired.offset]) if value >= wired.offset else [])


@dataclass(frozen=True, slots=True)
class Change:
    """Other precisions in one window: the variance, seconds, and bytes at each time that they add."""

    assignment: tuple[tuple[str, Precision], ...]
    variance: float
    seconds: float
    in_use: IntArray

    @property
    def ops(self) -> set[str]:
        """The operators that it changes."""
        return {op for op, _ in self.assignment}


class Round:
    """The priced changes of all windows of one class as it stands, and the moves they make."""

    def __init__(
        self,
        state: State,
        name: str,
        neighbours: Sequence[Sequence[str]],
        target_s: float,
        counts_bytes: bool,
    ) -> None:
        self._state, self._name, self._target_s = state, name, target_s
        self._counts_bytes = counts_bytes
        self.missed_memory = False  # whether a move did not fit in memory
        self.touched: set[str] = set()  # operators that moves changed
        self._one = state.classes[name]
        variance = self._one.part.variance
        self._now = {op: variance[op][self._one.precision(op)] for op in self._one.part.choices}
        # No compensating change may add more than the operator of most variance could regain.
        self._most = max(now - min(variance[op].values()) for op, now in self._now.items())
        _, self._start_s = state.late_starts()[name]
        self._slack_s = target_s * (1 + TOLERANCE) - self.seconds()
        found = [change for window in self.windows(neighbours) for change in self.priced(window)]
        different = {change.assignment: change for change in found}
        self.changes = sorted(different.values(), key=lambda change: change.variance)
        self._least_gain = _MIN_GAIN * self._one.variance

    def exchange(self) -> bool:
        """Make the largest gains, each with compensating changes until it holds; return whether any was made.

        Unlike `moves`, replay every change of an exchange: changes may save together what none saves alone.
        """
        gains = [change for change in self.changes if change.variance < -self._least_gain][:_MAX_EXCHANGED]
        for gain in gains:
            if not self.touched & gain.ops:
                self.touched |= self._exchanged(gain)
        return bool(self.touched)

    def _exchanged(self, gain: Change) -> set[str]:
        """Make one gain with compensating changes; return the operators changed, none if it does not hold."""
        moves, changed = [self._state.move(self._name, dict(gain.assignment))], set(gain.ops)
        left = -gain.variance - self._least_gain
        for missing, saved in self._measures():
            able = [
                c for c in self.changes if saved(c) > 0.0 and c.variance < left and not self.touched & c.ops
            ]
            able.sort(key=lambda change: change.variance / saved(change))
            if missing() > _SAVED_TOGETHER * sum(saved(change) for change in able[:_MAX_LOWERED]):
                break
            for change in able:
                if missing() <= 0.0 or len(moves) > _MAX_LOWERED:
                    break
                if change.variance >= left or changed & change.ops:
                    continue
                before = missing()
                moves.append(self._state.move(self._name, dict(change.assignment)))
                if missing() < before:
                    changed |= change.ops
                    left -= change.variance
                else:
                    self._state.back(moves.pop())
        if holds(self._state, self._target_s):
            return changed
        self.missed_memory |= not self._one.fits()
        for move in reversed(moves):
            self._state.back(move)
        return set()

    def _measures(self) -> Iterator[tuple[Callable[[], float], Callable[[Change], float]]]:
        """Yield, for bytes and then for seconds, how much is missing now and how much a change saves."""
        if self._counts_bytes:
            when, budget = int(self._one.in_use().argmax()), self._one.part.budget_bytes
            yield lambda: float(self._one.peak_bytes - budget), lambda change: -float(change.in_use[when])
        most_s = self._target_s * (1 + TOLERANCE)
        yield lambda: self.seconds() - most_s, lambda change: -change.seconds

    def move(self) -> bool:
        """Make the moves that lessen the variance most and hold; return whether there was any."""
        for _, rows in self.moves()[:_MAX_REPLAYED_PER_ROUND]:
            assignment = dict(pair for row in rows for pair in self.changes[row].assignment)
            if self.touched & set(assignment):
                continue
            move = self._state.move(self._name, assignment)
            if holds(self._state, self._target_s):
                self.touched |= set(assignment)
            else:
                self.missed_memory |= not self._one.fits()
                self._state.back(move)
        return bool(self.touched)

    def moves(self) -> list[tuple[float, tuple[int, ...]]]:
        """Return the moves that fit as (variance added, rows of `changes`), least variance first."""
        if not self.changes:
            return []
        column = {op: i for i, op in enumerate(self._now)}
        of = np.zeros((len(self.changes), len(column)), dtype=bool)
        for row, change in enumerate(self.changes):
            of[row, [column[op] for op, _ in change.assignment]] = True
        one = self._one
        uses = np.array([[change.seconds for change in self.changes]]) / self._target_s
        slack = np.array([self._slack_s]) / self._target_s
        if self._counts_bytes:
            # At these times most is in use after some change; the other times follow from them.
            in_use, added = one.in_use(), np.array([change.in_use for change in self.changes])
            times = np.unique(np.append((in_use + added).argmax(axis=1), in_use.argmax()))
            uses = np.concatenate([uses, added[:, times].T / one.part.budget_bytes])
            slack = np.append(slack, 1.0 - in_use[times] / one.part.budget_bytes)
        variance = np.array([change.variance for change in self.changes])
        return combine(Changes(of, variance, uses.T), slack, self._least_gain)

    def windows(self, neighbours: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
        """Yield each operator with as many neighbours as may be priced, the largest window first."""
        variance = self._one.part.variance
        most = min(_MAX_PRICED_PER_WINDOW, _MAX_PRICED_PER_CLASS // len(neighbours))
        most = max(most // (_MEMORY_PRICING_FACTOR if self._counts_bytes else 1), 2)
        windows: dict[tuple[str, ...], None] = {}
        for ops in neighbours:
            num_assignments, window = 1, list[str]()
            for op in ops:
                num_assignments *= sum(v - self._now[op] < self._most for v in variance[op].values())
                if num_assignments > most and window:
                    break
                window.append(op)
            windows[tuple(window)] = None
        covered: set[frozenset[str]] = set()
        for found in sorted(windows, key=len, reverse=True):
            pairs = {frozenset((found[0], other)) for other in found[: _NUM_NEAREST + 1]}
            if not pairs <= covered:
                covered |= {frozenset((a, b)) for a in found for b in found}
                yield found

    def priced(self, window: Sequence[str]) -> list[Change]:
        """Return every assignment of a window that lessens variance, or saves seconds or bytes."""
        state, one = self._state, self._one
        variance, found = one.part.variance, list[Change]()
        before_s, before = self.seconds(), self._in_use()
        gained = [min(variance[op].values()) - self._now[op] for op in window]

        def choose(chosen: tuple[tuple[str, Precision], ...], k: int, added: float) -> None:
            if added + sum(gained[k:]) >= self._most:
                return
            if k == len(window):
                if chosen:
                    found.append(Change(chosen, added, self.seconds() - before_s, self._in_use() - before))
                return
            op = window[k]
            for precision in one.part.choices[op]:
                move = state.move(self._name, {op: precision})
                pair = ((op, precision),) if move.changes else ()
                choose(chosen + pair, k + 1, added + variance[op][precision] - self._now[op])
                state.back(move)

        choose((), 0, 0.0)
        return self._useful(found)

    def _useful(self, found: list[Change]) -> list[Change]:
        """Leave out changes that neither gain nor save, and those that another of the window dominates.

        Where bytes count, no change is dominated: it may save bytes at a time when no other does.
        """
        found = [c for c in found if c.variance < 0.0 or c.seconds < 0.0 or int(c.in_use.min()) < 0]
        if self._counts_bytes:
            return found
        useful, fastest_s = list[Change](), np.inf
        for change in sorted(found, key=lambda change: (change.variance, change.seconds)):
            if change.seconds < fastest_s:
                useful.append(change)
                fastest_s = change.seconds
        return useful

    def seconds(self) -> float:
        """Return a lower bound of the step's seconds with the class as it stands."""
        work = self._one.work.slower(self._state.late_factor(self._name))
        return least_time(work, self._start_s, self._state.problem.exchange)

    def _in_use(self) -> IntArray:
        return self._one.in_use() if self._counts_bytes else np.zeros(1, dtype=np.int64)

"""Neighbours change together: in one window of the graph to gain variance, in others to pay for it (ours).

A cast depends on both of its ends, so what several neighbours cost together is not the sum of what each
costs: q and k in another precision may pay for a cast of attention that neither pays for alone, and a search
that changes one operator at a time stands still there. A window is an operator with those nearest to it, as
many as have few enough assignments to price them all. Of what was priced, an assignment of one window that
lessens the variance and those of others that pay for it in time and bytes, least variance for what is lacking
first, are made together where replay says that they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync.allocator.solvers.compensation import Changes, paid
from qsync.allocator.solvers.recovery import TOLERANCE, holds
from qsync.allocator.state import ClassState, State
from qsync.lowering.wiring import Wiring, wiring
from qsync.records.precision import Precision
from qsync.replayer import least_time, starts_s

IntArray = npt.NDArray[np.int64]

# So many assignments are priced of one window at the most, and of all windows of a class in one round: where
# there are many operators their windows are small. Bytes take several times as long to look at as seconds.
_MOST_OF_WINDOW, _MOST_OF_CLASS, _BYTES_TAKE = 500, 16_000, 2
# A window is looked for among so many operators, and so many values away from the first.
_MOST_NEAR, _DISTANCE = 8, 6
# A value read by more operators than this (a mask that every block reads) does not make them neighbours.
_MOST_READERS = 8
# No window is needed whose first operator stands in others beside this many of its nearest.
_NEAREST = 3
# So many of what changes make together are replayed in one round, and so many rounds are made.
_MOST_REPLAYED, _MOST_ROUNDS = 64, 20
# A change that lessens a class's variance by a smaller part is not worth looking for.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class _Change:
    """Other precisions in one window: the variance, seconds and bytes at each time that they add."""

    assignment: tuple[tuple[str, Precision], ...]
    variance: float
    seconds: float
    in_use: IntArray


def change_windows(state: State, classes: Sequence[str], target_s: float, enough: float = 0.0) -> bool:
    """Change windows of these classes while that lessens the variance, all holds, and it is above `enough`.

    `state` must hold. Priced are up to `_MOST_OF_CLASS` assignments a round, whatever the clock says. Returns
    whether any window was changed.

    >>> change_windows(state, ["infer"], target_s=0.1)
    """
    changed = False
    for name in classes if state.variance > enough else ():
        near = list(_nearest(state.classes[name]))
        for _ in range(_MOST_ROUNDS if near and state.classes[name].variance > 0.0 else 0):
            if state.variance <= enough or not _Round(state, name, near, target_s).change():
                break
            changed = True
    return changed


def _nearest(one: ClassState) -> Iterator[list[str]]:
    """Every operator that has a choice, and those nearest to it in the graph, the nearest first."""
    ops, wired = one.part.graph.ops, wiring(one.part.graph)
    free = {i for i, op in enumerate(ops) if len(one.part.choices.get(op.name, ())) > 1}
    for i in sorted(free):
        found, front = [i], [wired.offset + i]
        seen = set(front)
        for _ in range(_DISTANCE):
            around = [value for at in front for value in _beside(wired, at)]
            front = [value for value in dict.fromkeys(around) if value not in seen]
            seen.update(front)
            found += [value - wired.offset for value in front if value - wired.offset in free]
        yield [ops[j].name for j in found[:_MOST_NEAR]]


def _beside(wired: Wiring, value: int) -> list[int]:
    readers = wired.consumers[value]
    down = [wired.offset + i for i in readers] if len(readers) <= _MOST_READERS else []
    return down + (list(wired.operands[value - wired.offset]) if value >= wired.offset else [])


class _Round:
    """What all windows of a class cost as it stands, and the first of what they make together that holds."""

    def __init__(self, state: State, name: str, near: Sequence[Sequence[str]], target_s: float) -> None:
        self._state, self._name, self._target_s = state, name, target_s
        self._one = state.classes[name]
        variance = self._one.part.variance
        self._now = {op: variance[op][self._one.precision(op)] for op in self._one.part.choices}
        # Who pays more than the dearest operator could regain is never worth it.
        self._most = max(now - min(variance[op].values()) for op, now in self._now.items())
        self._least = _LEAST * self._one.variance
        works = {n: one.work.slower(1 + state.late.get(n, 0.0)) for n, one in state.classes.items()}
        starts = starts_s(list(works.values()), state.problem.exchange)
        self._start_s = dict(zip(works, starts, strict=True))[name]
        self._room_s = target_s * (1 + TOLERANCE) - self._seconds()
        found = [change for window in self._windows(near) for change in self._priced(window)]
        different = {change.assignment: change for change in found}
        self._changes = sorted(different.values(), key=lambda change: change.variance)

    def change(self) -> bool:
        """Make the changes that lessen the variance most and hold; whether there was any."""
        changed, touched = False, set[str]()
        for _, chosen in self._found()[:_MOST_REPLAYED]:
            assignment = dict(pair for number in chosen for pair in self._changes[number].assignment)
            if touched & set(assignment):
                continue
            move = self._state.move(self._name, assignment)
            if holds(self._state, self._target_s):
                changed = True
                touched |= set(assignment)
            else:
                self._state.back(move)
        return changed

    def _seconds(self) -> float:
        """Below which no step falls as the class is now."""
        work = self._one.work.slower(1 + self._state.late.get(self._name, 0.0))
        return least_time(work, self._start_s, self._state.problem.exchange)

    def _in_use(self) -> IntArray:
        return self._one.in_use() if self._one.is_tight else np.zeros(1, dtype=np.int64)

    def _windows(self, near: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
        """The nearest of each operator, as many as there is time for; the largest first."""
        variance = self._one.part.variance
        most = min(_MOST_OF_WINDOW, _MOST_OF_CLASS // len(near))
        most = max(most // (_BYTES_TAKE if self._one.is_tight else 1), 2)
        windows: dict[tuple[str, ...], None] = {}
        for ops in near:
            many, window = 1, list[str]()
            for op in ops:
                many *= sum(v - self._now[op] < self._most for v in variance[op].values())
                if many > most and window:
                    break
                window.append(op)
            windows[tuple(window)] = None
        beside: set[frozenset[str]] = set()
        for found in sorted(windows, key=len, reverse=True):
            first = {frozenset((found[0], other)) for other in found[: _NEAREST + 1]}
            if not first <= beside:
                beside |= {frozenset((a, b)) for a in found for b in found}
                yield found

    def _priced(self, window: Sequence[str]) -> list[_Change]:
        """Every assignment of a window that gains or pays."""
        state, one = self._state, self._one
        variance, found = one.part.variance, list[_Change]()
        begun_s, begun = self._seconds(), self._in_use()
        gained = [min(variance[op].values()) - self._now[op] for op in window]

        def go_on(chosen: tuple[tuple[str, Precision], ...], k: int, more: float) -> None:
            if more + sum(gained[k:]) >= self._most:
                return
            if k == len(window):
                if chosen:
                    seconds, in_use = self._seconds() - begun_s, self._in_use() - begun
                    found.append(_Change(chosen, more, seconds, in_use))
                return
            op = window[k]
            for precision in one.part.choices[op]:
                move = state.move(self._name, {op: precision})
                added = ((op, precision),) if move.changes else ()
                go_on(chosen + added, k + 1, more + variance[op][precision] - self._now[op])
                state.back(move)

        go_on((), 0, 0.0)
        return self._worth(found)

    def _worth(self, found: list[_Change]) -> list[_Change]:
        """Without those that neither gain nor pay; where only seconds count, without those that another
        beats in both.
        """
        found = [c for c in found if c.variance < 0.0 or c.seconds < 0.0 or int(c.in_use.min()) < 0]
        if self._one.is_tight:
            return found
        kept, fastest = list[_Change](), np.inf
        for change in sorted(found, key=lambda change: (change.variance, change.seconds)):
            if change.seconds < fastest:
                kept.append(change)
                fastest = change.seconds
        return kept

    def _found(self) -> list[tuple[float, tuple[int, ...]]]:
        """What changes add together, and their numbers, least variance first."""
        if not self._changes:
            return []
        number = {op: i for i, op in enumerate(self._now)}
        of = np.zeros((len(self._changes), len(number)), dtype=bool)
        for row, change in enumerate(self._changes):
            of[row, [number[op] for op, _ in change.assignment]] = True
        one, rows = self._one, self._changes
        takes = np.array([[change.seconds for change in rows]]) / self._target_s
        room = np.array([self._room_s]) / self._target_s
        if one.is_tight:
            # At these times most is in use once a change is made; the others follow.
            in_use, changed = one.in_use(), np.array([change.in_use for change in rows])
            times = np.unique(np.append((in_use + changed).argmax(axis=1), in_use.argmax()))
            takes = np.concatenate([takes, changed[:, times].T / one.part.budget_bytes])
            room = np.append(room, 1.0 - in_use[times] / one.part.budget_bytes)
        variance = np.array([change.variance for change in rows])
        return paid(Changes(of, variance, takes.T), room, self._least)

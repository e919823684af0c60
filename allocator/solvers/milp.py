"""The exact solver: assignments of least variance by mixed-integer programs (HiGHS in scipy).

A target for the step decouples the classes. For any class, and for any bucket k of gradients, a step is never
shorter than

    l + r_k + v (b - r_k) + sum over j < k of min(e_j, d_j) + sum over j >= k of d_j

    l    seconds of the class before backward
    b    seconds of its whole backward
    r_k  seconds of its backward until bucket k is complete
    d_k  seconds of bucket k's all-reduce alone
    e_k  toll of bucket k's all-reduce: compute seconds that the class loses if it computes beside it
    v    delay of the all-reduces from k on, in seconds per second of backward that overlaps them

Before bucket k starts, every earlier all-reduce has either taken its toll or delayed the class by a wait.
While the rest of backward runs, the following all-reduces are slower. These rows are linear in the choices
(`device_class_model`), so the programs give a lower bound of the variance of all plans.

The solutions of the programs are replayed. If a replayed step is longer than its rows (a class waits for
another), the programs are solved again for a target shorter by the difference. A cut excludes an assignment
that needs too much memory. Every returned solution was replayed. One row counts the bytes certainly saved for
backward (`memory_rows`). No row counts other memory, so the bound is loose if memory binds. If the
best solution of the rows misses a limit, a class of few assignments is solved by replay in order of variance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync.allocator.block_levers import KEEP, Treatment
from qsync.allocator.search_state import State
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.memory_rows import MemoryRows, row_near, row_of_saved_bytes
from qsync.allocator.solvers.milp_expressions import (
    INFEASIBLE,
    OPTIMAL,
    STATUSES,
    TIME_LIMITED,
    UNSOLVED,
    FloatArray,
    Row,
    Sum,
    total,
)
from qsync.allocator.solvers.precision_recovery import TOLERANCE, holds, raise_classes, recover, repair
from qsync.allocator.solvers.replayed_assignments import MAX_REPLAYED, ReplayedAssignments, num_assignments
from qsync.operators.precision import Precision
from qsync.replayer import step_time
from qsync.replayer.synchronous_step import LEAST_RATE, least_losses_s

# A class's precisions, and the levers of its blocks.
Candidate = tuple[dict[str, Precision], Treatment]

# The target's value in scaled rows: HiGHS's tolerance of 1e-6 is then 1e-9 of the target.
_TARGET_SCALED = 1e3
# The known plan's variance in the scaled objective, since HiGHS has an absolute tolerance of 1e-6.
_KNOWN_SCALED = 1e4
# A program is solved again in the scale of its own solution if the known plan's variance is higher by this
# factor: else HiGHS's tolerance on a costly choice would matter beside so small an objective.
_FAR = 30.0
# A plan whose variance exceeds its bound by more than this fraction is repaired.
_LOOSE = 0.02
# The most solutions of a class's program after replay exceeds its rows in time or memory.
_MAX_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution; `bound` is a lower bound of the variance of all plans within time and memory.

    `status` is "optimal" if `gap` is within the requested gap. Else it is "time-limited" or "unsolved" if
    HiGHS reports this of a program. It is "unproved" if more time would not help: the bound is loose, since
    it counts memory only in part and ignores the waits of classes for each other.
    """

    assignments: Mapping[str, Mapping[str, Precision]]
    treatments: Mapping[str, Treatment]
    variance: float
    bound: float
    status: str
    seconds: float

    @property
    def gap(self) -> float:
        """Return the largest fraction of the variance that a better plan could save."""
        return max(0.0, 1.0 - self.bound / self.variance) if self.variance > 0.0 else 0.0


def solve(
    state: State, lowerable: Sequence[str], target_s: float, *, gap: float = 1e-4, time_limit_s: float = 20.0
) -> Solution:
    """Minimise the variance and leave `state` at the solution; `state` must start within all limits.

    Afterwards operators are raised one by one while time and memory allow (`recover`).

    >>> solve(state, ["infer"], target_s=0.1).gap
    """
    begun = time.perf_counter()
    end = begun + time_limit_s
    raise_classes(state, lowerable, target_s)
    best, treated, least = state.assignments(), state.treatments(), state.variance
    settled = sum(one.variance for name, one in state.classes.items() if name not in lowerable)
    bound, candidate = settled, {name: (found, treated[name]) for name, found in best.items()}
    # A class without added variance has no better assignment.
    open_ = [name for name in lowerable if state.classes[name].variance > 0.0]
    parts = list[_Class]()
    for number, name in enumerate(open_):
        until = time.perf_counter() + (end - time.perf_counter()) / (len(open_) - number)
        part = _Class(state, name, target_s, lowerable, state.classes[name].variance)
        least_here = part.solve(until - time.perf_counter(), gap)
        if 0.0 < part.best_variance < state.classes[name].variance / _FAR:  # far below the program's scale
            part = _Class(state, name, target_s, lowerable, part.best_variance, part.best)
            least_here = part.solve(until - time.perf_counter(), gap)
        parts.append(part)
        bound += least_here
        candidate[name] = part.best
    tightened = target_s
    for _ in range(_MAX_ROUNDS):
        for name, (assignment, treatment) in candidate.items():
            state.treat(name, treatment)
            state.move(name, assignment)
        if holds(state, target_s):
            break
        late = state.late_step_s() / target_s - 1.0
        tightened *= 1.0 - min(max(late, 1e-6), 0.1)
        if time.perf_counter() > end:
            break
        for part in parts:
            left = end - time.perf_counter()
            candidate[part.name] = part.within(tightened, left / len(parts), gap) or candidate[part.name]
    if not holds(state, target_s):
        state.restore(best, treated)
    recover(state, lowerable, target_s)
    if state.variance > least:
        state.restore(best, treated)
    # The bound does not exclude a better plan.
    while bound < state.variance * (1 - _LOOSE) and time.perf_counter() < end:
        if not repair(state, lowerable, target_s):
            break
        recover(state, lowerable, target_s)
    return _solution(state, bound, gap, begun, parts)


def _solution(state: State, bound: float, gap: float, begun: float, parts: Sequence[_Class]) -> Solution:
    variance, seconds = state.variance, time.perf_counter() - begun
    found = state.assignments(), state.treatments()
    solution = Solution(*found, variance, min(bound, variance), OPTIMAL, seconds)
    if solution.gap <= max(gap, 1e-9):
        return solution
    stopped = {part.status for part in parts} - {OPTIMAL}
    return replace(solution, status=min(stopped, default="unproved"))


class _Class:
    """One class: its program, the rows of its step, and its best assignment so far."""

    def __init__(
        self,
        state: State,
        name: str,
        target_s: float,
        lowerable: Sequence[str],
        scale: float,
        best: Candidate | None = None,
    ) -> None:
        self.name, self._state, self._target_s = name, state, target_s
        self._one = state.classes[name]
        self._part = state.plain(name).part
        self.best = best or (
            {op: self._one.precision(op) for op in self._part.choices}, self._one.treatment
        )  # fmt: skip
        self.status = OPTIMAL  # the worst status of HiGHS
        # Upper limit of the variance of useful solutions.
        self._variance = min(self._one.variance, _FAR * scale)
        self._weight = _KNOWN_SCALED / scale
        self._beside = [one.work for other, one in state.classes.items() if other not in lowerable]
        self._is_partial = len(lowerable) > 1  # other lowerable classes are left out of its replays
        # If buffers are broadcast first, all classes start together, at a time independent of choices.
        _, self._start_s = state.late_starts(least=True)[name]
        self._model = ClassModel(state.problem.graph, self._part, self._weight, self._weight * self._variance)
        self._cuts: list[Row] = []
        self._memory: MemoryRows | None = None
        if self._part.blocks:
            self._memory = MemoryRows(self._model, self._part, state.problem.cluster.num_ranks)
        elif self._one.is_tight:
            self._cuts = [row_of_saved_bytes(self._model, self._one.part)]
        self._forward = total(self._model.forward_s)
        # Row 0 counts all of backward. Row k counts it in full until the operator that completes bucket k-1.
        self._ready = [0, *(bucket.ready for bucket in state.problem.exchange.buckets)]
        self._rows: dict[int, Sum] = {}
        self._add_row(0)
        self._replayed: ReplayedAssignments | None = None

    def solve(self, time_limit_s: float, gap: float) -> float:
        """Find the best assignment; return a lower bound of the variance of all assignments."""
        if self._is_settled:
            return self._variance
        end = time.perf_counter() + time_limit_s
        bound, exact, target_s = 0.0, True, self._target_s
        for _ in range(_MAX_ROUNDS):
            point, least = self._solved(target_s, end - time.perf_counter(), gap)
            if exact:
                bound = max(bound, least)
            if point is None:
                break
            over = self._misses(point)
            if over is None:
                self.best = self._with_fewest_levers(point, end)
                break
            if time.perf_counter() > end:
                self.status = TIME_LIMITED
                break
            late, is_exact = over
            exact &= is_exact
            if not exact and num_assignments(self._part) <= MAX_REPLAYED:
                return self._replay_all(bound, end)
            target_s *= 1.0 - late
        return bound

    def _with_fewest_levers(self, point: FloatArray, end: float) -> Candidate:
        """Return a solution's precisions with the levers of least time at which they fit in memory."""
        assignment, treatment = self._candidate(point)
        if self._memory is None or {KEEP}.issuperset(treatment):
            return assignment, treatment
        seconds = Sum()
        seconds.add(total([self._forward, *self._model.backward_s]), _TARGET_SCALED / self._target_s)
        chosen = [self._model.chosen[op][p] for op, p in assignment.items()]
        fixed = [(binary, 1.0, 1.0) for binary in chosen if not binary.settled]
        for _ in range(_MAX_ROUNDS):
            also = [*fixed, *self._memory.rows()]
            result = self._model.program.solve(seconds, also=also, time_limit_s=end - time.perf_counter())
            if result.x is None:
                break
            fewer = self._model.treatment(result.x)
            with self._state.tried(self.name, assignment, fewer) as one:
                if one.fits():
                    is_late = self._step_s() > self._target_s * (1 + TOLERANCE)
                    return assignment, treatment if is_late else fewer
                self._memory.tighten(result.x, one)
        return assignment, treatment

    def _replay_all(self, bound: float, end: float) -> float:
        """Replay the assignments from variance `bound` up; keep the best, and return a lower bound.

        This is faster than cuts, each of which excludes one assignment and takes another program, if rows
        count little of the memory.
        """
        self._replayed = ReplayedAssignments(self._part, self._step_s_where_it_fits, bound, self._variance)
        found, least = self._replayed.best_within(self._target_s, end)
        if found is not None:
            self.best = found
        elif least < self._variance:
            self.status = TIME_LIMITED
        return min(least, self._variance)

    def within(self, target_s: float, time_limit_s: float, gap: float) -> Candidate | None:
        """Return the best candidate for another target; None if none is found in time."""
        if self._is_settled:
            return None
        if self._replayed is not None:
            return self._replayed.best_within(target_s, time.perf_counter() + time_limit_s)[0]
        point = self._solved(target_s, time_limit_s, gap)[0]
        return None if point is None else self._candidate(point)

    def _candidate(self, point: FloatArray) -> Candidate:
        return self._model.assignment(point), self._model.treatment(
            point
        ) if self._memory else self._one.treatment

    @property
    def best_variance(self) -> float:
        """Return the variance of the best assignment so far."""
        return sum(self._part.variance[op][self.best[0][op]] for op in self._part.choices)

    @property
    def _is_settled(self) -> bool:
        """Return whether the class has no open choice or no variance to save."""
        return self._variance == 0.0 or self._model.program.num_columns == 0

    def _solved(self, target_s: float, time_limit_s: float, gap: float) -> tuple[FloatArray | None, float]:
        """Return a solution that satisfies all rows, and a lower bound of the variance of any."""
        end, bound = time.perf_counter() + time_limit_s, 0.0
        while True:
            most = _TARGET_SCALED * target_s / self._target_s * (1 + TOLERANCE)
            rows = [(row, -np.inf, most) for row in self._rows.values()]
            memory = self._memory.rows() if self._memory else []
            result = self._model.program.solve(
                also=[*rows, *self._cuts, *memory], gap=gap / 2, time_limit_s=end - time.perf_counter()
            )
            status = STATUSES[result.status]
            if status in (TIME_LIMITED, UNSOLVED):
                self.status = status
            least = result.mip_dual_bound
            if least is not None and np.isfinite(least):
                bound = max(bound, (least + self._model.settled_cost) / self._weight)
            elif status == INFEASIBLE:  # no assignment is better than the known one
                bound = self._variance
            if result.x is None:
                return None, bound
            broken = self._most_broken_row(result.x, target_s)
            if broken is None:
                return result.x, bound
            self._add_row(broken)

    def _most_broken_row(self, point: FloatArray, target_s: float) -> int | None:
        """Return the number of the missing row that a solution violates most; None if it violates none."""
        forward, backward = self._forward.at(point), np.array([s.at(point) for s in self._model.backward_s])
        worst, most = None, target_s * (1 + 1e-8)
        for k in range(len(self._ready)):
            seconds = self._seconds(k, forward, float(self._shares(k) @ backward))
            if k not in self._rows and seconds > most:
                worst, most = k, seconds
        return worst

    def _shares(self, k: int) -> FloatArray:
        """Return the coefficient of each operator's backward in row k: 1 until the bucket is complete."""
        shares = np.ones(len(self._model.backward_s))
        if k > 0:
            shares[: max(self._ready[k], 0)] = self._toll_share(k)
        return shares

    def _toll_share(self, k: int) -> float:
        """Return the delay of row k's and later all-reduces per second of overlapping backward."""
        exchange = self._state.problem.exchange
        tolls, alone, rate = self._one.work.tolls_s, exchange.durations_s, exchange.link.overlap_rate
        losses = [toll * rate / d if d > 0.0 else 0.0 for toll, d in zip(tolls, alone, strict=True)][k - 1 :]
        return (1.0 - rate) / (1.0 - min(rate, *losses, 1.0 - LEAST_RATE))

    def _add_row(self, k: int) -> None:
        """Add row `k`: of the whole step (0), or of bucket k - 1 (from 1)."""
        seconds = Sum()
        seconds.add(self._forward)
        for part, share in zip(self._model.backward_s, self._shares(k).tolist(), strict=True):
            if share:
                seconds.add(part, share)
        factor = self._seconds(k, 1.0, 0.0) - self._seconds(k, 0.0, 0.0)
        row = Sum(constant=self._seconds(k, 0.0, 0.0) * _TARGET_SCALED / self._target_s)
        row.add(seconds, factor * _TARGET_SCALED / self._target_s)
        self._rows[k] = row

    def _seconds(self, k: int, forward_s: float, backward_s: float) -> float:
        """Return row k's lower bound of the step, from forward seconds and weighted backward seconds."""
        exchange, profile = self._state.problem.exchange, self._one.part.profile
        copied = float(self._shares(k) @ exchange.copied_bytes)
        if k == 0 or self._ready[k] < 0:
            copied += exchange.unused_bytes
        lead = profile.loading_s + profile.host_s + profile.outside.total_s
        own = lead + forward_s + backward_s + copied * profile.bucket_s_per_byte
        seconds = own * self._state.late_factor(self.name) + self._start_s
        if k == 0:
            return seconds
        lost = float(least_losses_s(self._one.work, exchange)[: k - 1].sum())
        return seconds + lost + sum(exchange.durations_s[k - 1 :])

    def _misses(self, point: FloatArray) -> tuple[float, bool] | None:
        """Return a solution's relative lateness, and whether the rows stay exact; None if it holds.

        A row is added that excludes a solution beyond memory. Rows stay exact if it excludes no other one.
        """
        assignment, treatment = self._candidate(point)
        with self._state.tried(self.name, assignment, treatment) as one:
            late, fits = self._step_s() / self._target_s - 1.0, one.fits()
            if late <= TOLERANCE and fits:
                return None
            is_exact = late <= TOLERANCE
            if not fits and self._memory is not None:
                is_exact &= self._memory.tighten(point, one)
            elif not fits:
                self._cuts.append(row_near(self._model, self._state, self.name, assignment))
                is_exact = False
        return max(late, 0.0), is_exact

    def _step_s_where_it_fits(self, assignment: Mapping[str, Precision], treatment: Treatment) -> float:
        """Return the step's seconds of a candidate; infinite if it is in time but misses memory."""
        with self._state.tried(self.name, assignment, treatment) as one:
            step_s = self._step_s()
            if step_s <= self._target_s * (1 + TOLERANCE) and not one.fits():
                step_s = math.inf
        return step_s

    def _step_s(self) -> float:
        """Return the step's seconds of this class with the classes that are not lowered.

        If other classes are lowered too, leave out the waiting toll (`Work.is_one`), so that the result is a
        lower bound of the step of all classes.
        """
        own = self._state.classes[self.name].work
        works = [own.slower(self._state.late_factor(self.name)), *self._beside]
        if self._is_partial:
            works = [replace(work, is_one=False) for work in works]
        return step_time(works, self._state.problem.exchange)

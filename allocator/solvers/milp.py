"""The exact solver: every class's assignment of least variance, as a mixed-integer program (HiGHS, by scipy).

A target for the step decouples the classes. With l the seconds before backward, r_k those until bucket k
is complete, d_k its all-reduce alone and e_k what that takes from compute, a step is never shorter than

    l + r_k + v (b - r_k) + sum over j < k of min(e_j, d_j) + sum over j >= k of d_j              (ours)

for any class, with b its whole backward and v how much a second of it delays all-reduces beside it: before
bucket k starts every earlier all-reduce has either taken its toll or been waited for, and while the rest of
backward runs, those that follow are slower. These rows are linear in the choices (`linear`), so what the
programs say is a bound that no plan falls below. What they find is replayed: where replay adds more than the
rows (a class that waits for another) they are solved again for a target shorter by that, where an assignment
needs too much memory it is cut off, and what is returned was replayed in any case. Of memory there is a row
of what is certainly kept for backward (`kept`); what else a step needs is in none, so where memory binds the
bound is the lower for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync.allocator.solvers.class_model import LinearClass
from qsync.allocator.solvers.local_search import change_windows
from qsync.allocator.solvers.memory_bound import kept_bytes
from qsync.allocator.solvers.milp_expressions import (
    INFEASIBLE,
    OPTIMAL,
    STATUSES,
    TIME_LIMITED,
    UNSOLVED,
    FloatArray,
    Sum,
    total,
)
from qsync.allocator.solvers.recovery import PRIORITIES, TOLERANCE, holds, recover
from qsync.allocator.state import State
from qsync.predictor.memory.peak import bytes_throughout, stated_error
from qsync.records.precision import Precision
from qsync.replayer import step_time
from qsync.replayer.simulate import LEAST_RATE, starts_s

Assignments = dict[str, dict[str, Precision]]
Row = tuple[Sum, float, float]

# Rows are scaled so that the target is this: HiGHS keeps them to a millionth, so to 1e-9 of the target.
_SCALE = 1e3
# The variance of the plan that is known is scaled to this: HiGHS stops at differences of a millionth.
_KNOWN = 1e4
# How often a class is solved again because replay, or memory, says more than its rows.
_MAX_ROUNDS = 30
# A plan within this part of its bound is near enough to the best that `judge` looks no further.
_NEAR = 0.05
# With so few choices every assignment that replay refuses is cut off by itself, which is exact.
_FEW, _MAX_CUTS = 12, 300


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found. `bound` is a variance that no plan within time and memory falls below.

    `status` is "optimal" where `gap` is within what was asked; else "time-limited" or "unsolved" where HiGHS
    says so of a program, and "unproved" where more time would not help: the bound is what is loose (it knows
    of memory only in part, and not that classes wait for each other).
    """

    assignments: Mapping[str, Mapping[str, Precision]]
    variance: float
    bound: float
    status: str
    seconds: float

    @property
    def gap(self) -> float:
        """The part of the variance by which a better plan might be better."""
        return max(0.0, 1.0 - self.bound / self.variance) if self.variance > 0.0 else 0.0


def solve(
    state: State, lowerable: Sequence[str], target_s: float, *, gap: float = 1e-4, time_limit_s: float = 20.0
) -> Solution:
    """Make the variance least, beginning with what `state` has, which must hold; ends with `state` there.

    Where memory binds, the rows know too little of it to find the best: where they leave it open whether
    there is a better plan, windows are changed at last (`change_windows`).

    >>> solve(state, ["infer"], target_s=0.1).gap
    """
    begun = time.perf_counter()
    best, least = state.assignments(), state.variance
    settled = sum(one.variance for name, one in state.classes.items() if name not in lowerable)
    bound, candidate = settled, {name: dict(found) for name, found in best.items()}
    # Of a class that adds nothing there is nothing better.
    parts = [_Class(state, n, target_s, lowerable) for n in lowerable if state.classes[n].variance > 0.0]
    for number, part in enumerate(parts):
        left = time_limit_s - (time.perf_counter() - begun)
        bound += part.solve(left / (len(parts) - number), gap)
        candidate[part.name] = part.best
    tightened = target_s
    for _ in range(_MAX_ROUNDS):
        state.restore(candidate)
        if holds(state, target_s):
            break
        late = state.late_step_s() / target_s - 1.0
        tightened *= 1.0 - min(max(late, 1e-6), 0.1)
        if time.perf_counter() - begun > time_limit_s:
            break
        for part in parts:
            left = time_limit_s - (time.perf_counter() - begun)
            candidate[part.name] = part.within(tightened, left / len(parts), gap) or candidate[part.name]
    if holds(state, target_s):
        recover(state, lowerable, target_s, PRIORITIES[1])
    if holds(state, target_s) and state.variance < least:
        best, least = state.assignments(), state.variance
    state.restore(best)
    change_windows(state, lowerable, target_s, enough=bound / (1.0 - _NEAR))
    return _solution(state, bound, gap, begun, parts)


def judge(
    state: State, lowerable: Sequence[str], target_s: float, *, gap: float = 1e-4, time_limit_s: float = 20.0
) -> Solution:
    """What `state` has, with a bound beside it: the least variance if operators could be mixed in precision.

    Takes a fraction of the time that `solve` does, and the bound is a little lower. Where it leaves it open
    whether there is a better plan, windows are changed (`change_windows`); ends with `state` there.

    >>> judge(state, ["infer"], target_s=0.1).gap
    """
    begun = time.perf_counter()
    bound = sum(one.variance for name, one in state.classes.items() if name not in lowerable)
    parts = [_Class(state, n, target_s, lowerable) for n in lowerable if state.classes[n].variance > 0.0]
    for part in parts:
        bound += part.relaxed(time_limit_s - (time.perf_counter() - begun))
    change_windows(state, lowerable, target_s, enough=bound / (1.0 - _NEAR))
    return _solution(state, bound, gap, begun, parts)


def _solution(state: State, bound: float, gap: float, begun: float, parts: Sequence[_Class]) -> Solution:
    variance, seconds = state.variance, time.perf_counter() - begun
    solution = Solution(state.assignments(), variance, min(bound, variance), OPTIMAL, seconds)
    if solution.gap <= max(gap, 1e-9):
        return solution
    stopped = {part.status for part in parts} - {OPTIMAL}
    return replace(solution, status=min(stopped, default="unproved"))


class _Class:
    """One class: its program, the rows of its step, and the best assignment found so far."""

    def __init__(self, state: State, name: str, target_s: float, lowerable: Sequence[str]) -> None:
        self.name, self._state, self._target_s = name, state, target_s
        self._one = state.classes[name]
        self.best = {op: self._one.precision(op) for op in self._one.part.choices}
        self.status = OPTIMAL  # the worst that HiGHS said
        self._variance = self._one.variance
        self._weight = _KNOWN / self._variance if self._variance > 0.0 else 1.0
        self._beside = [
            one.work.slower(1 + state.late.get(other, 0.0))
            for other, one in state.classes.items()
            if other not in lowerable
        ]
        # Where buffers are handed out first all start with the last; an optimizer takes as long in any case.
        works = {name: one.work.slower(1 + state.late.get(name, 0.0)) for name, one in state.classes.items()}
        start_s = starts_s(list(works.values()), state.problem.exchange)
        self._start_s = dict(zip(works, start_s, strict=True))[name]
        self._linear = LinearClass(self._one.part.graph, self._one.part, self._weight, _KNOWN)
        self._cuts: list[Row] = [self._memory()] if self._one.is_tight else []
        self._forward = total(self._linear.forward_s)
        # The operator until whose backward each row counts: the whole step first, then every bucket.
        self._ready = [0, *(bucket.ready for bucket in state.problem.exchange.buckets)]
        self._rows: dict[int, Sum] = {}
        self._until(0)

    def solve(self, time_limit_s: float, gap: float) -> float:
        """Find the best assignment; the variance that none falls below."""
        if self._is_settled:
            return self._variance
        end = time.perf_counter() + time_limit_s
        few = sum(len(self._linear.chosen[op]) > 1 for op in self._one.part.choices) <= _FEW
        bound, exact, target_s = 0.0, True, self._target_s
        for _ in range(_MAX_CUTS if few else _MAX_ROUNDS):
            found, least = self._solved(target_s, end - time.perf_counter(), gap)
            if exact:
                bound = max(bound, least)
            if found is None:
                break
            over = self._over(found)
            if over is None:
                self.best = found
                break
            if time.perf_counter() > end:
                self.status = TIME_LIMITED
                break
            if few:
                self._cuts.append(self._linear.excluding(found))
            else:
                exact = False
                late, row = over
                target_s *= 1.0 - late
                if row is not None:
                    self._cuts.append(row)
        return bound

    def relaxed(self, time_limit_s: float) -> float:
        """The variance that no assignment falls below, as far as mixtures of precisions say."""
        if self._is_settled:
            return self._variance
        return self._solved(self._target_s, time_limit_s, 0.0, relaxed=True)[1]

    def within(self, target_s: float, time_limit_s: float, gap: float) -> dict[str, Precision] | None:
        """The best assignment for another target, if there is one in the time."""
        return None if self._is_settled else self._solved(target_s, time_limit_s, gap)[0]

    @property
    def _is_settled(self) -> bool:
        """Whether there is nothing to choose, or nothing to gain."""
        return self._variance == 0.0 or self._linear.program.num_columns == 0

    def _solved(
        self, target_s: float, time_limit_s: float, gap: float, relaxed: bool = False
    ) -> tuple[dict[str, Precision] | None, float]:
        """An assignment that keeps the rows, and the least variance that any has."""
        end, bound = time.perf_counter() + time_limit_s, 0.0
        while True:
            most = _SCALE * target_s / self._target_s * (1 + TOLERANCE)
            rows = [(row, -np.inf, most) for row in self._rows.values()]
            result = self._linear.program.solve(
                also=[*rows, *self._cuts],
                gap=gap / 2,
                time_limit_s=end - time.perf_counter(),
                relaxed=relaxed,
            )
            status = STATUSES[result.status]
            if status in (TIME_LIMITED, UNSOLVED):
                self.status = status
            least = result.fun if relaxed else result.mip_dual_bound
            if least is not None and np.isfinite(least):
                bound = max(bound, (least + self._linear.settled_cost) / self._weight)
            elif status == INFEASIBLE:  # nothing is better than the plan that is known
                bound = self._variance
            if result.x is None:
                return None, bound
            broken = self._broken(result.x, target_s)
            if broken is None:
                return self._linear.assignment(result.x), bound
            self._until(broken)

    def _broken(self, point: FloatArray, target_s: float) -> int | None:
        """The bucket whose row, not yet among them, is broken most."""
        forward, backward = self._forward.at(point), np.array([s.at(point) for s in self._linear.backward_s])
        worst, most = None, target_s * (1 + 1e-8)
        for k in range(len(self._ready)):
            seconds = self._seconds(k, forward, float(self._shares(k) @ backward))
            if k not in self._rows and seconds > most:
                worst, most = k, seconds
        return worst

    def _shares(self, k: int) -> FloatArray:
        """How much of each operator's backward row k counts: all until its bucket is complete."""
        shares = np.ones(len(self._linear.backward_s))
        if k > 0:
            shares[: max(self._ready[k], 0)] = self._beside_flights(k)
        return shares

    def _beside_flights(self, k: int) -> float:
        """By how many seconds a second of backward delays the all-reduces from row k's on."""
        exchange = self._state.problem.exchange
        tolls, alone, rate = self._one.work.tolls_s, exchange.durations_s, exchange.link.overlap_rate
        losses = [toll * rate / d if d > 0.0 else 0.0 for toll, d in zip(tolls, alone, strict=True)][k - 1 :]
        return (1.0 - rate) / (1.0 - min(rate, *losses, 1.0 - LEAST_RATE))

    def _until(self, k: int) -> None:
        """Add the row of the whole step (0), or of a bucket (from 1)."""
        seconds = Sum()
        seconds.add(self._forward)
        for part, share in zip(self._linear.backward_s, self._shares(k).tolist(), strict=True):
            if share:
                seconds.add(part, share)
        factor = self._seconds(k, 1.0, 0.0) - self._seconds(k, 0.0, 0.0)
        row = Sum(constant=self._seconds(k, 0.0, 0.0) * _SCALE / self._target_s)
        row.add(seconds, factor * _SCALE / self._target_s)
        self._rows[k] = row

    def _seconds(self, k: int, forward_s: float, backward_s: float) -> float:
        """Seconds that a step takes at the least, by row k, of whose share of backward it is given."""
        exchange, profile = self._state.problem.exchange, self._one.part.profile
        copied = float(self._shares(k) @ exchange.copied_bytes)
        if k == 0 or self._ready[k] < 0:
            copied += exchange.unused_bytes
        lead = profile.loading_s + profile.host_s + profile.outside.total_s
        own = lead + forward_s + backward_s + copied * profile.bucket_s_per_byte
        seconds = own * (1 + self._state.late.get(self.name, 0.0)) + self._start_s
        if k == 0:
            return seconds
        tolls, alone = self._one.work.tolls_s, exchange.durations_s
        lost = sum(min(toll, duration) for toll, duration in zip(tolls[: k - 1], alone, strict=False))
        return seconds + lost + sum(alone[k - 1 :])

    def _over(self, assignment: Mapping[str, Precision]) -> tuple[float, Row | None] | None:
        """None if replay of this class beside those that stand holds; else the part by which it is late, and
        a row that memory asks for.
        """
        state, move = self._state, self._state.move(self.name, assignment)
        work = self._one.work.slower(1 + state.late.get(self.name, 0.0))
        late = step_time([work, *self._beside], state.problem.exchange) / self._target_s - 1.0
        row = None if self._one.fits() else self._less_memory(assignment)
        state.back(move)
        return (max(late, 0.0), row) if late > TOLERANCE or row is not None else None

    def _memory(self) -> Row:
        """What is certainly kept for backward, within the budget: a row that holds wherever memory does."""
        part = self._one.part
        device, budget = part.device_class.device, part.budget_bytes
        throughout = part.profile.optimizer_bytes + bytes_throughout(part.graph)
        row = Sum(constant=_SCALE * (throughout / budget - 1.0))
        kept = kept_bytes(self._linear, part.graph, device)
        row.add(kept, _SCALE * (1.0 + stated_error(device)) / budget)
        return row, -np.inf, 0.0

    def _less_memory(self, assignment: Mapping[str, Precision]) -> Row:
        """What assignments near this one need when it needs most, as far as single changes say, within the
        budget (ours).
        """
        state, one = self._state, self._one
        (when, peak), budget = one.bytes_at(), one.part.budget_bytes
        row = Sum(constant=float(peak - budget))
        for op in one.part.choices:
            for precision, bit in self._linear.chosen[op].items():
                if precision is not assignment[op]:
                    move = state.move(self.name, {op: precision})
                    row.add(bit, float(one.bytes_at(when)[1] - peak))
                    state.back(move)
        scaled = Sum()
        scaled.add(row, _SCALE / budget)
        return scaled, -np.inf, 0.0

"""Rows of the exact solver's programs that keep a class within its memory budget, by moment of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from qsync.allocator.block_levers import RECOMPUTED
from qsync.allocator.problem import ClassProblem
from qsync.allocator.search_state import ClassState, State
from qsync.allocator.solvers.linear_lowering import LinearLowering
from qsync.allocator.solvers.memory_lower_bound import bytes_around, saved_bytes
from qsync.allocator.solvers.milp_expressions import ONE, ZERO, FloatArray, Row, Sum, difference
from qsync.allocator.solvers.moments import LOSS, Moment, moments
from qsync.operators.precision import Precision
from qsync.predictor.memory.layout import layout
from qsync.predictor.memory.peak import bytes_throughout, margin_parts, stated_error

# A budget's value in scaled rows: HiGHS's tolerance of 1e-6 is then 1e-9 of the budget.
SCALED = 1e3
# The most moments that a solution beyond the budget adds: one of each block, the fullest first.
_MOST_ADDED = 8


class MemoryRows:
    """The rows that keep a class within its budget: at the loss, and where solutions exceeded it.

    Blocks are alike, so a solution beyond the budget adds the fullest moment of each block that exceeds it. A
    row that misses a solution beyond the budget is corrected by what it misses there. It is then accurate
    near this solution, and no bound any more.
    """

    def __init__(self, linear: LinearLowering, part: ClassProblem, num_ranks: int) -> None:
        self._linear, self._part, self._in_buckets = linear, part, num_ranks > 1
        self._of: dict[Moment, Sum] = {}
        self._missed: dict[Moment, float] = {}
        self._any_again = linear.program.at_least_any([of.get(RECOMPUTED, ZERO) for of in linear.levers])
        self._add(LOSS)

    @property
    def is_exact(self) -> bool:
        """Return whether no row was corrected: then rows exclude nothing that fits."""
        return not any(self._missed.values())

    def rows(self) -> list[Row]:
        """Return the rows, scaled so that the budget is `SCALED`."""
        return [row for moment in self._of for row in self._rows_of(moment)]

    def tighten(self, point: FloatArray, exceeding: ClassState) -> bool:
        """Exclude a solution whose replay exceeds the budget; return whether no other one is excluded."""
        in_use = exceeding.bytes_by_time()
        at = moments(layout(exceeding.part.graph), self._linear.block)
        fullest: dict[tuple[int | None, bool], Moment] = {}
        peak = at[int(in_use.argmax())]
        for when in (-in_use).argsort(kind="stable").tolist():
            if in_use[when] <= self._part.budget_bytes or len(fullest) == _MOST_ADDED:
                break
            moment = at.get(when)
            if moment is not None:
                block = None if moment.op is None else self._linear.block[moment.op]
                fullest.setdefault((block, moment.again is not None), moment)
        is_new = peak not in self._of
        for moment in fullest.values():
            if moment not in self._of:
                self._add(moment)
        if is_new:
            return True
        share, constant = margin_parts(
            self._part.device_class.device, RECOMPUTED in exceeding.treatment, False
        )
        counted = self._throughout + constant + (1.0 + share) * self._of[peak].at(point)
        missed = (int(in_use.max()) - counted) / (1.0 + share) + 1.0
        self._missed[peak] = max(self._missed[peak], missed)
        return False

    @property
    def _throughout(self) -> int:
        return self._part.profile.optimizer_bytes + bytes_throughout(self._part.graph)

    def _add(self, moment: Moment) -> None:
        part = self._part
        device = part.device_class.device
        found = saved_bytes(self._linear, part.graph, device, moment)
        for binary, num_bytes in bytes_around(self._linear, part.graph, device, self._in_buckets, moment):
            found.add(binary, num_bytes)
        if moment == Moment(0):  # the last backward is at the time of the optimizer's step
            found.constant += part.profile.optimizer_workspace_bytes
        self._of[moment], self._missed[moment] = found, 0.0

    def _rows_of(self, moment: Moment) -> Iterator[Row]:
        """Yield a moment's rows: with the margin without recomputation, and with that of any."""
        device, budget = self._part.device_class.device, self._part.budget_bytes
        most = self._of[moment].constant + sum(max(0.0, c) for c in self._of[moment].terms.values())
        for again in (False, True) if self._any_again.terms else (False,):
            share, constant = margin_parts(device, again, False)
            row = Sum(constant=self._throughout + constant + (1.0 + share) * self._missed[moment] - budget)
            row.add(self._of[moment], 1.0 + share)
            free = most * (1.0 + share) + max(0.0, row.constant)
            if again:
                row.add(difference(self._any_again, ONE), free)
            if moment.again is not None:
                row.add(difference(self._linear.levers[moment.again][RECOMPUTED], ONE), free)
            yield _within(row, budget)


def row_of_saved_bytes(linear: LinearLowering, part: ClassProblem) -> Row:
    """Return the row that keeps the bytes certainly saved for backward within the budget."""
    device, budget = part.device_class.device, part.budget_bytes
    row = Sum(constant=float(part.profile.optimizer_bytes + bytes_throughout(part.graph) - budget))
    row.add(saved_bytes(linear, part.graph, device), 1.0 + stated_error(device))
    return _within(row, budget)


def row_near(linear: LinearLowering, state: State, name: str, assignment: Mapping[str, Precision]) -> Row:
    """Return the row that keeps memory within the budget at the time of the peak of `assignment`.

    It adds up the bytes of single changes, so it is accurate only near this assignment, which the class has.
    """
    one = state.classes[name]
    in_use = one.bytes_by_time()
    when = int(in_use.argmax())
    row = Sum(constant=float(in_use[when] - one.part.budget_bytes))
    for op in one.part.choices:
        for precision, binary in linear.chosen[op].items():
            if precision is not assignment[op]:
                move = state.move(name, {op: precision})
                row.add(binary, float(one.bytes_by_time()[when] - in_use[when]))
                state.back(move)
    return _within(row, one.part.budget_bytes)


def _within(excess: Sum, budget_bytes: int) -> Row:
    """Return the row that lets no bytes exceed a budget, scaled."""
    scaled = Sum()
    scaled.add(excess, SCALED / budget_bytes)
    return scaled, -math.inf, 0.0

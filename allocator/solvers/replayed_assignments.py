"""All assignments of a class that has few, replayed one by one from the least variance up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping

from qsync.allocator.problem import ClassProblem
from qsync.allocator.solvers.precision_recovery import TOLERANCE
from qsync.records.precision import Precision

MAX_REPLAYED = 20_000  # they take seconds
_ROUNDING = 1e-9  # of a variance


def num_assignments(part: ClassProblem) -> int:
    """Return how many assignments a class has."""
    return math.prod(map(len, part.choices.values()))


class ReplayedAssignments:
    """The assignments of a class whose variance lies between two, ordered by it.

    `step_s` replays one: infinite where it may not be. Each is replayed once, whatever the target.

    >>> ReplayedAssignments(part, step_s, least, known).best_within(target_s=0.1, end=time.perf_counter() + 9)
    """

    def __init__(
        self,
        part: ClassProblem,
        step_s: Callable[[Mapping[str, Precision]], float],
        least: float,
        known: float,
    ) -> None:
        self._ops, self._replay, self._known = list(part.choices), step_s, known
        every = (
            (sum(part.variance[op][p] for op, p in zip(self._ops, chosen, strict=True)), chosen)
            for chosen in itertools.product(*part.choices.values())
        )
        low, high = least * (1 - _ROUNDING), known * (1 + _ROUNDING)
        between = [each for each in every if low <= each[0] <= high]
        self._by_variance = sorted(between, key=lambda each: each[0])  # stable: ties keep their order
        self._step_s: list[float] = []  # of those replayed so far

    def best_within(self, target_s: float, end: float) -> tuple[dict[str, Precision] | None, float]:
        """Return the assignment of least variance that holds, and the variance that none falls below.

        No assignment is returned where none holds, or where `end` (of time.perf_counter) came before one was
        found; then none falls below the last that was replayed.
        """
        for k, (variance, chosen) in enumerate(self._by_variance):
            assignment = dict(zip(self._ops, chosen, strict=True))
            if k == len(self._step_s):
                if time.perf_counter() > end:
                    return None, variance
                self._step_s.append(self._replay(assignment))
            if self._step_s[k] <= target_s * (1 + TOLERANCE):
                return assignment, variance
        return None, self._known

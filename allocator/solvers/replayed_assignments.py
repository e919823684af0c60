"""All assignments of a class with few choices, replayed in order of variance."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping

from qsync.allocator.block_levers import KEEP, Treatment
from qsync.allocator.problem import ClassProblem
from qsync.allocator.solvers.precision_recovery import TOLERANCE
from qsync.operators.precision import Precision

MAX_REPLAYED = 20_000  # assignments; their replay takes seconds
_ROUNDING = 1e-9  # relative error of a variance


def num_assignments(part: ClassProblem) -> int:
    """Return the number of possible assignments of a class, with every lever of its blocks."""
    options = [len(block.options) for block in part.blocks]
    return math.prod([*map(len, part.choices.values()), *options])


class ReplayedAssignments:
    """The assignments of a class with variance from `least` to `known`, in order of variance.

    Each comes with every lever of the blocks, fewest levers first. `step_s` replays one, to infinite seconds
    if it is not allowed. Replays are cached, so targets share them.

    >>> ReplayedAssignments(part, step_s, least, known).best_within(target_s=0.1, end=time.perf_counter() + 9)
    """

    def __init__(
        self,
        part: ClassProblem,
        step_s: Callable[[Mapping[str, Precision], Treatment], float],
        least: float,
        known: float,
    ) -> None:
        self._ops, self._replay, self._known = list(part.choices), step_s, known
        treatments = itertools.product(*(block.options for block in part.blocks))
        fewest_first = sorted(treatments, key=lambda each: len(each) - each.count(KEEP))
        every = (
            (sum(part.variance[op][p] for op, p in zip(self._ops, chosen, strict=True)), chosen, treatment)
            for chosen in itertools.product(*part.choices.values())
            for treatment in fewest_first
        )
        low, high = least * (1 - _ROUNDING), known * (1 + _ROUNDING)
        between = [each for each in every if low <= each[0] <= high]
        self._by_variance = sorted(between, key=lambda each: each[0])  # stable: ties keep their order
        self._step_s: list[float] = []  # of the assignments replayed so far, in order

    def best_within(
        self, target_s: float, end: float
    ) -> tuple[tuple[dict[str, Precision], Treatment] | None, float]:
        """Return the assignment and levers of least variance that reach the target, and a lower bound.

        The assignment is None if none reaches the target, or if the time `end` (of time.perf_counter) passed
        first. In that case the bound is the variance of the next assignment to replay.
        """
        for k, (variance, chosen, treatment) in enumerate(self._by_variance):
            assignment = dict(zip(self._ops, chosen, strict=True))
            if k == len(self._step_s):
                if time.perf_counter() > end:
                    return None, variance
                self._step_s.append(self._replay(assignment, treatment))
            if self._step_s[k] <= target_s * (1 + TOLERANCE):
                return (assignment, treatment), variance
        return None, self._known

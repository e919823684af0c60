"""The result of a solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync.records.precision import Precision


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution. `bound` is a variance that no plan within time and memory falls below.

    `status` is "optimal" where `gap` is within the gap asked for, else "time-limited" or "unsolved" where
    HiGHS says so of a program. It is "unproved" where more time would not help: the bound is loose, since it
    counts memory only in part and does not know that classes wait for each other.
    """

    assignments: Mapping[str, Mapping[str, Precision]]
    variance: float
    bound: float
    status: str
    seconds: float

    @property
    def gap(self) -> float:
        """The largest part of the variance that a better plan could save."""
        return max(0.0, 1.0 - self.bound / self.variance) if self.variance > 0.0 else 0.0

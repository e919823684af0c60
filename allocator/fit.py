"""Say whether a batch fits in a class's memory, and by which ways it can be made to fit. Pure.

A way is a number of passes with, where that alone does not fit, precisions and levers of blocks from the
solver: those of least variance, with levers and by precisions alone, and those of the least step. Every way
is replayed as a step of ranks of this class alone: nobody waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from qsync.allocator.planner import Options, Start
from qsync.allocator.uniform import uniform
from qsync.errors import DoesNotFitError, FormatError
from qsync.records.levers import RECOMPUTE, SAVE_LESS, ClassLevers, samples_of
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer import Recapture
from qsync.replayer.levers.apply import profile_under
from qsync.replayer.levers.batch_size import reach
from qsync.replayer.levers.recomputation import blocks
from qsync.replayer.memory_breakdown import Peak, peaks

MOST_PASSES = 64
_ANY_STEP_S = 1e6  # a target that every plan reaches, so that the least variance decides
_LIMIT_S = 1.0  # of the solver, for each way to become faster or more exact once it fits


@dataclass(frozen=True, slots=True)
class Way:
    """One way to take a batch on a class: its levers, and the operators that run below the base."""

    levers: ClassLevers
    saving_less: tuple[str, ...]
    num_lowered: int
    peak_bytes: int
    step_s: float
    added_variance: float

    def is_no_worse(self, other: Way) -> bool:
        """Return whether another way is neither faster, nor more exact, nor smaller."""
        mine, its = ((w.step_s, w.added_variance, w.peak_bytes) for w in (self, other))
        return all(own <= theirs for own, theirs in zip(mine, its, strict=True))


@dataclass(frozen=True, slots=True)
class Fit:
    """What a class needs for a batch, and the ways to give it that.

    `base` is one pass in the base, and `peak` what fills its memory. `ways` fit, least step first; none is
    slower, less exact and larger than another. `largest` is the most samples that fit in one pass in the
    base, one less than `trusted_from` where not even the fewest do that costs are trusted at, and None where
    a second capture of the model is missing or gives no sizes. `nearest` is the way of least memory of all
    that were tried.
    """

    device_class: str
    samples: int
    peak: Peak
    base: Way
    ways: tuple[Way, ...]
    largest: int | None
    trusted_from: int
    nearest: Way
    num_blocks: int

    @property
    def fits(self) -> bool:
        """Return whether the batch fits as it is."""
        return self.base.peak_bytes <= self.peak.budget_bytes


def find_fit(basis: Basis, device_class: str, other: Recapture | None = None, base: str | None = None) -> Fit:
    """Return what a class of a cluster needs for its batch, and the ways to make it fit.

    `other` is a capture of the model with another number of samples, for passes and the largest batch. The
    class's own memory is the budget (`Cluster.with_memory` sets another).

    >>> find_fit(basis, "T4", other, "fp16").ways[0].levers.passes
    2
    """
    return _Fitting(basis, device_class, other, base).found()


class _Fitting:
    def __init__(self, basis: Basis, device_class: str, other: Recapture | None, base: str | None) -> None:
        self._basis, self._name, self._other, self._base = basis, device_class, other, base
        own = basis.cluster[device_class]
        self._device, self._memory_bytes = own.device, own.memory_bytes
        self._cluster = replace(basis.cluster, classes=(replace(own, count=basis.cluster.num_ranks),))
        self._profile = basis.profiles[device_class]
        self._samples, self._blocks = samples_of(basis.graph), blocks(basis.graph)
        self._reach = reach(self._profile, basis.graph, other)
        self._tried: list[Way] = []

    def found(self) -> Fit:
        plan, profile = self._plain(ClassLevers())
        assignments = {self._name: plan[self._name].assignment}
        peak = peaks(self._basis.graph, assignments, {self._name: profile}, self._cluster)[self._name]
        base = self._way(plan, ClassLevers())
        for passes in self._passes():
            with suppress(FormatError):  # sizes that no line through two captures gives
                if self._in_passes(passes):
                    break
        fitting = sorted((way for way in self._tried if self._fits(way)), key=lambda way: way.step_s)
        ways: list[Way] = []
        for way in fitting:
            if not any(better.is_no_worse(way) for better in ways):
                ways.append(way)
        nearest = min(self._tried, key=lambda way: way.peak_bytes)
        return Fit(
            self._name, self._samples, peak, base, tuple(ways), self._largest(), self._reach[0], nearest,
            len(self._blocks),
        )  # fmt: skip

    def _in_passes(self, passes: int) -> bool:
        """Try all ways of so many passes; return whether the passes alone fit."""
        levers = ClassLevers(passes=passes)
        if self._fits(self._try(levers)):
            return True
        # All targets have one fastest start. If it does not fit, none does; if it is exact, no way is better.
        by_levers = self._start(levers, (RECOMPUTE, SAVE_LESS))
        if by_levers is None:
            if self._blocks:
                self._try(replace(levers, recomputed=self._blocks))
            return False
        if self._planned(by_levers, slack=0.0).added_variance > 0.0:
            self._planned(by_levers, target_s=_ANY_STEP_S)
        by_precisions = self._start(levers)
        if by_precisions is not None:
            self._planned(by_precisions, target_s=_ANY_STEP_S)
        return False

    def _start(self, levers: ClassLevers, block_levers: tuple[str, ...] = ()) -> Start | None:
        """Return the solver's fastest start with precisions and levers of blocks; None if nothing fits."""
        basis, profiles = self._basis, {self._name: self._under(levers)}
        given = Options(base=self._base, time_limit_s=_LIMIT_S, block_levers=block_levers)
        try:
            return Start(basis.graph, profiles, basis.sensitivity, self._cluster, given)
        except DoesNotFitError:
            return None

    def _planned(self, start: Start, **target: float) -> Way:
        plan = start.plan(**target)
        self._tried.append(way := self._way(plan, plan.levers_of(self._name)))
        return way

    def _passes(self) -> Iterator[int]:
        """Yield the numbers of equal passes, from one on, whose sizes the costs are trusted at."""
        for k in range(1, min(MOST_PASSES, self._samples) + 1):
            able = k == 1 or (self._other is not None and self._samples // k >= self._reach[0])
            if self._samples % k == 0 and able:
                yield k

    def _largest(self) -> int | None:
        """Return the most samples of one pass in the base that fit."""
        if self._other is None:
            return None
        fewest, most = self._reach

        def exceeds(more: int) -> bool:
            plan, _ = self._plain(ClassLevers(samples=fewest + more - 1))
            return not self._fits(self._way(plan, ClassLevers()))

        with suppress(FormatError):
            return fewest + least(exceeds, most - fewest + 2) - 2
        return None

    def _try(self, levers: ClassLevers) -> Way:
        way = self._way(self._plain(levers)[0], levers)
        self._tried.append(way)
        return way

    def _plain(self, levers: ClassLevers) -> tuple[Plan, Profile]:
        """Return the plan of the base, and the profile that it is replayed with."""
        profile, basis = self._under(levers), self._basis
        plan = uniform(
            basis.graph, {self._name: profile}, self._cluster, {},
            base=self._base, sensitivity=basis.sensitivity, strict=True,
        )  # fmt: skip
        return plan, profile

    def _under(self, levers: ClassLevers) -> Profile:
        if levers == ClassLevers():
            return self._profile
        return profile_under(self._basis.graph, self._profile, levers, self._other, self._device)

    def _way(self, plan: Plan, levers: ClassLevers) -> Way:
        entry = plan[self._name]
        assert entry.predicted is not None and plan.step_s is not None, "plans made here are replayed"
        return Way(
            levers, entry.saving_less, len(entry.lowered), entry.predicted.memory_bytes, plan.step_s,
            entry.predicted.added_variance,
        )  # fmt: skip

    def _fits(self, way: Way) -> bool:
        return way.peak_bytes <= self._memory_bytes


def least(holds: Callable[[int], bool], most: int) -> int:
    """Return the least number from 1 to `most` for which a condition holds that stays true; else `most`.

    >>> least(lambda k: k * k >= 10, 9)
    4
    """
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

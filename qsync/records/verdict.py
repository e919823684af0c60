"""Verdict: samples per second of each way to use a job's cards, and each class's gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsync.records.record_json import Number, Record

PLAN = "this plan"


@dataclass(frozen=True, slots=True)
class Way:
    """Samples per second of one way to use the cards; nine of ten medians lie within `interval`."""

    name: str
    samples_per_s: Number
    interval: tuple[Number, Number] | None = None  # None if profiles have no error estimate

    @property
    def least(self) -> float:
        """Return the lower end of the interval, or the prediction without one."""
        return self.interval[0] if self.interval else self.samples_per_s

    @property
    def most(self) -> float:
        """Return the upper end of the interval, or the prediction if there is none."""
        return self.interval[1] if self.interval else self.samples_per_s


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    r"""Ways to train on a cluster, the strongest class alone first and the plan last. Simulated.

    `times` maps each class to the plan's speed relative to the best way without it; a class in `leave_out`
    adds nothing beyond the interval. `with_shares` estimates the speed with shares of the batch if the plan
    has none; None if they were planned, or are impossible. `lower_base` is the fastest way with a 16-bit
    base, named by it, if it exceeds the plan's interval.

    >>> print("\n".join(plan.verdict.lines()))
    """

    ways: tuple[Way, ...]
    times: Mapping[str, Number] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    with_shares: Number | None = None
    lower_base: Way | None = None

    def lines(self) -> list[str]:
        """Return the verdict as lines of text: one per way, and the gain of each class."""
        alone = self.ways[0].samples_per_s
        wide = max(len(way.name) for way in self.ways)
        found = ["samples per second, predicted:"]
        for way in self.ways:
            low_high = "  ({:.4g} to {:.4g})".format(*way.interval) if way.interval else ""
            rate = f"{way.samples_per_s:>8.4g}  {way.samples_per_s / alone:.2f}x"
            found.append(f"  {way.name:<{wide}}  {rate}{low_high}")
        for name, times in self.times.items():
            says = ", no gain that the profiles can tell: leave it out" if name in self.leave_out else ""
            found.append(f"{name}: {times - 1.0:+.0%}{says}")
        if self.with_shares is not None:
            found.append(
                f"shares of the batch would make about {self.with_shares / alone:.2f}x instead of "
                f"{self.ways[-1].samples_per_s / alone:.2f}x: give a loader of a qsync.ShareSampler"
            )
        if self.lower_base is not None:
            base, times = self.lower_base.name, self.lower_base.samples_per_s / alone
            found.append(f'with the strong cards in {base}, too: {times:.2f}x (base="{base}")')
        return found

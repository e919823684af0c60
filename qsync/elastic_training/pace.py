"""Detect when this card becomes slower than planned, and when it recovers. Pure.

A prediction may be off by a constant factor, which differs between plans. The first steps under a plan show
this factor; any later increase is a slowdown. It is reported when even the faster quarter of the last steps
takes `SLOWER` times as long and at least `LEAST_S` seconds longer, and ends below `BACK`. Each decision needs
a window of new steps whose halves agree.
"""

from __future__ import annotations

from collections.abc import Hashable
from statistics import quantiles

WINDOW = 20  # number of steps
SLOWER, BACK = 1.25, 1.1
LEAST_S = 0.005  # seconds; other processes of a host cause smaller differences


class Pace:
    """The slowdown of one card, from measured and predicted compute times of its steps.

    >>> pace.note("int8 everywhere", samples=16, measured_s=0.31, predicted_s=0.2)
    >>> pace.slowdown
    1.5
    """

    def __init__(self) -> None:
        self._runs: tuple[Hashable, int] = ("", 0)  # plan and samples of the steps in the window
        self._ratios: list[float] = []
        self._usual: dict[tuple[Hashable, int], float] = {}  # measured over predicted time, without slowdown
        self.slowdown = 1.0

    def note(self, plan: Hashable, samples: int, measured_s: float, predicted_s: float) -> bool:
        """Record one step; return whether the slowdown changed.

        Args:
            plan: the plan that this card used.
            samples: this card's samples in the step.
            measured_s: seconds of computation.
            predicted_s: the plan's predicted seconds without slowdown, for any fixed number of samples.
        """
        if (plan, samples) != self._runs:
            self._runs = (plan, samples)
            self._ratios.clear()
        self._ratios.append(measured_s / predicted_s)
        del self._ratios[:-WINDOW]
        if len(self._ratios) < WINDOW:
            return False
        early, late = (
            _faster_quarter(half) for half in (self._ratios[: WINDOW // 2], self._ratios[WINDOW // 2 :])
        )
        if not 1 / BACK < early / late < BACK:
            return False
        present = _faster_quarter(self._ratios)
        self._ratios.clear()
        usual = self._usual.setdefault(self._runs, self._usual_at(samples, present))
        factor = present / usual
        if self.slowdown == 1.0:
            longer_s = (present - usual) * predicted_s
            new = factor if factor >= SLOWER and longer_s >= LEAST_S else 1.0
        elif factor < BACK:
            new = 1.0
        else:
            new = factor if max(factor / self.slowdown, self.slowdown / factor) >= SLOWER else self.slowdown
        before, self.slowdown = self.slowdown, round(new, 1)
        return self.slowdown != before

    def _usual_at(self, samples: int, present: float) -> float:
        """Estimate the usual ratio of a plan and number of samples that this card runs first.

        The current slowdown is divided out, since a slowed card gets another plan and fewer samples. It may
        have ended meanwhile: fewer samples take no longer in total, and no less per sample.
        """
        usual = present / self.slowdown
        for (_, known), ratio in self._usual.items():
            least, most = sorted((ratio, ratio * samples / known))
            usual = min(max(usual, least), SLOWER * most)
        return usual


def _faster_quarter(ratios: list[float]) -> float:
    """Return the ratio at the faster quartile."""
    return quantiles(ratios, n=4)[0]

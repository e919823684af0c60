"""Tell whether this card has become slower than planned, and when it is back. Pure.

The plan's prediction may be off by a constant factor. The first steps show that factor; what comes on top of
it later is a slowdown. It is told when even the faster quarter of the last steps takes `SLOWER` times as
long and at least `LEAST_S` longer, and ends below `BACK`. Each decision needs a window of new steps.
"""

from __future__ import annotations

from statistics import quantiles

WINDOW = 20  # steps
SLOWER, BACK = 1.25, 1.1
LEAST_S = 0.005  # less is what other processes of a host take


class Pace:
    """The slowdown of one card, from the compute times of its steps and what was predicted for them.

    >>> pace.note(measured_s=0.31, predicted_s=0.2)
    >>> pace.slowdown
    1.5
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._ratios: list[float] = []
        self._usual: float | None = None
        self.slowdown = 1.0

    def note(self, measured_s: float, predicted_s: float) -> bool:
        """Note one step; return whether the slowdown changed. The prediction is that without slowdown."""
        self._ratios.append(measured_s / predicted_s)
        if len(self._ratios) < self._window:
            return False
        present = quantiles(self._ratios, n=4)[0]
        self._ratios.clear()
        if self._usual is None:
            self._usual = present
            return False
        factor = present / self._usual
        if self.slowdown == 1.0:
            longer_s = (present - self._usual) * predicted_s
            new = factor if factor >= SLOWER and longer_s >= LEAST_S else 1.0
        elif factor < BACK:
            new = 1.0
        else:
            new = factor if max(factor / self.slowdown, self.slowdown / factor) >= SLOWER else self.slowdown
        before, self.slowdown = self.slowdown, round(new, 1)
        return self.slowdown != before

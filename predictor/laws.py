"""The law of a kind of operator: its time as a launch, products at a share of their peak, and bytes at a
share of the bandwidth.

    t = a launch_s + b operations / peak rate + c bytes / bandwidth
    (ours)

1/b and 1/c are the shares of the roofline that the kind reaches. a, b and c have no unit: on another device
the same law gives other seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from qsync.predictor.gaussian import Array

# How firmly a law holds to the one it started from, in samples: a kind of which one was measured keeps most
# of its family's law, one of which twenty were has its own.
_PRIOR_SAMPLES = 1.0
_START = (1.0, 2.0, 2.0)
_LIMIT = 7.0  # shares from e^-7 to e^7: no law is driven to zero or beyond what a float tells apart


@dataclass(frozen=True, slots=True)
class Law:
    """a, b and c.

    >>> Law.fit(parts, seconds).at(parts)
    """

    parts: tuple[float, float, float] = _START

    def at(self, parts: Array) -> Array:
        """Seconds of calls whose (launch, products, bytes) at full speed take `parts` (N, 3) seconds."""
        seconds: Array = parts @ np.array(self.parts)
        return seconds

    @classmethod
    def fit(cls, parts: Array, seconds: Array, start: Law | None = None) -> Law:
        """The law that is nearest to samples in the logarithm of their time, outliers counted less.

        `parts` (N, 3), `seconds` (N,). Held to `start` where the samples say little.
        """
        origin = np.log((start or cls()).parts)
        wanted = np.log(seconds)

        def misses(x: Array) -> Array:
            return np.concatenate(
                [np.log(parts @ np.exp(x)) - wanted, _PRIOR_SAMPLES**0.5 * (x - origin) / 3]
            )

        bounds = (np.minimum(origin, -_LIMIT) - 1, np.maximum(origin, _LIMIT) + 1)
        found = least_squares(misses, origin, bounds=bounds, loss="soft_l1", f_scale=0.3).x
        return cls(tuple(float(value) for value in np.exp(found)))  # type: ignore[arg-type]

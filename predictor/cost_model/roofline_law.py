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
from scipy.optimize import least_squares, nnls

from qsync.predictor.cost_model.gaussian import Array

# How firmly a law holds to the one it started from, in samples that it misses by 100 %: a kind of which one
# was measured keeps its family's shares of launch, products and bytes, one of which a few were has its own.
_PRIOR_SAMPLES = 0.1
_START = (1.0, 2.0, 2.0)


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
        """The law with the least sum of squared relative misses: a linear fit, and no part of it negative.

        `parts` (N, 3), `seconds` (N,). Held to the logarithm of `start` where the samples say little.
        """
        origin = np.log((start or cls()).parts)
        shares, held = parts / seconds[:, None], _PRIOR_SAMPLES**0.5 / 3

        def misses(x: Array) -> Array:
            return np.concatenate([shares @ np.exp(x) - 1, held * (x - origin)])

        def slopes(x: Array) -> Array:
            return np.concatenate([shares * np.exp(x), held * np.eye(3)])

        # From afar the misses are flat, so that it starts from the fit without an origin.
        alone = np.maximum(nnls(shares, np.ones(len(seconds)))[0], 0.05 * np.exp(origin))
        found = least_squares(misses, np.log(alone), slopes, method="lm").x
        return cls(tuple(float(value) for value in np.exp(found)))  # type: ignore[arg-type]

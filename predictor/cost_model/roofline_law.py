"""The law of a kind of operator: time as a sum of launch, products and bytes, relative to peaks.

    t = a launch_s + b operations / peak rate + c bytes / bandwidth

1/b and 1/c are the fractions of the peaks that the kind reaches. a, b and c have no unit, so the same law
applies to the peaks of another device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

Array = npt.NDArray[np.float64]

# Weight of the prior law in the fit, in samples with an error of 100 %. A kind with one sample keeps its
# family's proportions of launch, products and bytes; a kind with a few samples gets its own.
_PRIOR_SAMPLES = 0.1
_START = (1.0, 2.0, 2.0)


@dataclass(frozen=True, slots=True)
class Law:
    """The coefficients a, b and c of a kind's time.

    >>> Law.fit(parts, seconds).parts
    """

    parts: tuple[float, float, float] = _START

    @classmethod
    def fit(cls, parts: Array, seconds: Array, start: Law | None = None) -> Law:
        """Fit the law of least squared relative errors with positive coefficients.

        `parts` (N, 3) are the seconds of (launch, products, bytes) at peak speed, `seconds` (N,) the measured
        ones. The logarithms of the coefficients are regularized towards those of `start`.
        """
        origin = np.log((start or cls()).parts)
        shares, weight = parts / seconds[:, None], _PRIOR_SAMPLES**0.5 / 3

        def residuals(x: Array) -> Array:
            return np.concatenate([shares @ np.exp(x) - 1, weight * (x - origin)])

        def jacobian(x: Array) -> Array:
            return np.concatenate([shares * np.exp(x), weight * np.eye(3)])

        # Residuals are flat far from the solution, so start at the fit without regularization.
        alone = np.maximum(nnls(shares, np.ones(len(seconds)))[0], 0.05 * np.exp(origin))
        found = least_squares(residuals, np.log(alone), jacobian, method="lm").x
        return cls(tuple(float(value) for value in np.exp(found)))  # type: ignore[arg-type]

"""Gaussian process regression: a smooth function through a few hundred samples, 0 far from all of them.

    k(x, x') = v Matern_5/2(|x - x'| / l),  y = f(x) + noise of variance v n

(Rasmussen and Williams 2006, chapters 2, 4 and 5). Features are standardized. v is the scale of the samples;
l and n have the largest marginal likelihood on a small grid. So a fit is exact and repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky

from qsync.errors import CalibrationError

Array = npt.NDArray[np.float64]

LENGTHS = (1.0, 2.0, 4.0, 8.0)
NOISES = (0.01, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Gaussian:
    """A fitted function with mean `at(x)`. It shrinks to 0 far from samples, and where they are noisy.

    >>> Gaussian.fit(x, y).at(new)
    """

    center: Array
    scale: Array
    length: float
    points: Array
    inverse: Array
    weights: Array

    @classmethod
    def fit(cls, x: Array, y: Array) -> Gaussian:
        """Fit samples x (N, D) -> y (N,).

        Raises CalibrationError if there are none, or one is not finite.
        """
        if not len(y) or not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise CalibrationError("there are no finite samples to learn from; measure some first")
        center, scale = x.mean(0), x.std(0)
        scale = np.where(scale < 1e-9, 1.0, scale)
        points = (x - center) / scale
        best, found = -np.inf, None
        for length in LENGTHS:
            kernel = _kernel(points, points, length)
            for noise in NOISES:
                factor = cholesky(kernel + noise * np.eye(len(y)), lower=True)
                weights = cho_solve((factor, True), y)
                likelihood = _likelihood(factor, y, weights)
                if likelihood > best:
                    best, found = likelihood, (length, factor, weights)
        assert found is not None
        length, factor, weights = found
        return cls(center, scale, length, points, cho_solve((factor, True), np.eye(len(y))), weights)

    def at(self, x: Array) -> Array:
        """Return the mean (N,) at x (N, D)."""
        found: Array = _kernel((x - self.center) / self.scale, self.points, self.length) @ self.weights
        return found

    def without(self, rows: npt.NDArray[np.intp], y: Array) -> Array:
        """Return the mean at `rows` of a fit to the other samples with values y (N,), at the same l and n.

        With C the inverse of kernel and noise it is y_rows - C[rows, rows]^-1 (C y)_rows (after Rasmussen and
        Williams 2006, section 5.4.2).
        """
        missed = np.linalg.solve(self.inverse[np.ix_(rows, rows)], self.inverse[rows] @ y)
        return np.asarray(y[rows] - missed, np.float64)


def _likelihood(factor: Array, y: Array, weights: Array) -> float:
    """Return the log marginal likelihood, up to a constant, at the variance that maximizes it."""
    variance = max(float(y @ weights) / len(y), 1e-12)
    return -float(np.log(np.diag(factor)).sum()) - 0.5 * len(y) * float(np.log(variance))


def _kernel(a: Array, b: Array, length: float) -> Array:
    """Return Matern 5/2 of the distances between the rows of a and b."""
    squared = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T
    r = np.sqrt(5.0 * np.maximum(squared, 0.0)) / length
    kernel: Array = (1 + r + r * r / 3) * np.exp(-r)
    return kernel

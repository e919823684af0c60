"""Gaussian process regression: a smooth function through a few hundred noisy samples, and how sure it is.

    k(x, x') = v (Matern_5/2(|x - x'| / l) + c (1 + x . x')),  y = f(x) + noise of variance v n

(Rasmussen and Williams 2006, chapters 2, 4 and 5). Features and targets are standardized; v is the samples'
own scale, and l, c, n are those of a small grid with the largest marginal likelihood, so that a fit is exact
and repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from qsync.errors import CalibrationError

Array = npt.NDArray[np.float64]

LENGTHS = (1.0, 2.0, 4.0, 8.0)
LINEAR = (0.0, 0.03)
NOISES = (0.001, 0.01, 0.05, 0.2)


@dataclass(frozen=True, slots=True)
class Gaussian:
    """A fitted function. `at(x)` is its mean and standard deviation (that of a new sample, noise included).

    >>> mean, deviation = Gaussian.fit(x, y).at(new)
    """

    center: Array
    scale: Array
    mean: float
    variance: float
    length: float
    linear: float
    noise: float
    points: Array
    factor: Array
    weights: Array

    @classmethod
    def fit(cls, x: Array, y: Array) -> Gaussian:
        """The function through samples x (N, D) -> y (N,). CalibrationError if there are none, or one is no
        number."""
        if not len(y) or not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise CalibrationError("there are no finite samples to learn from; measure some first")
        center, scale = x.mean(0), x.std(0)
        scale = np.where(scale < 1e-9, 1.0, scale)
        points, mean = (x - center) / scale, float(y.mean())
        best = max(
            (_likelihood(points, y - mean, *choice), choice) for choice in product(LENGTHS, LINEAR, NOISES)
        )[1]
        return cls._with(center, scale, mean, points, y - mean, *best)

    @classmethod
    def _with(
        cls, center: Array, scale: Array, mean: float, points: Array, y: Array, length: float,
        linear: float, noise: float,
    ) -> Gaussian:  # fmt: skip
        factor = _factor(points, length, linear, noise)
        weights = _solve(factor, y)
        variance = max(float(y @ weights) / len(y), 1e-12)
        return cls(center, scale, mean, variance, length, linear, noise, points, factor, weights)

    def at(self, x: Array) -> tuple[Array, Array]:
        """Mean (N,) and standard deviation (N,) of new samples at x (N, D)."""
        new = (x - self.center) / self.scale
        cross = _kernel(new, self.points, self.length, self.linear)
        inner = np.linalg.solve(self.factor, cross.T)
        prior = 1 + self.linear * (1 + (new * new).sum(1))
        left = np.maximum(prior - (inner * inner).sum(0), 0.0) + self.noise
        return self.mean + cross @ self.weights, np.sqrt(self.variance * left)


def _likelihood(x: Array, y: Array, length: float, linear: float, noise: float) -> float:
    """Log marginal likelihood, up to a constant, with the variance that makes it largest."""
    factor = _factor(x, length, linear, noise)
    variance = max(float(y @ _solve(factor, y)) / len(y), 1e-12)
    return -float(np.log(np.diag(factor)).sum()) - 0.5 * len(y) * float(np.log(variance))


def _factor(x: Array, length: float, linear: float, noise: float) -> Array:
    return np.asarray(np.linalg.cholesky(_kernel(x, x, length, linear) + noise * np.eye(len(x))), np.float64)


def _solve(factor: Array, y: Array) -> Array:
    solved: Array = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
    return solved


def _kernel(a: Array, b: Array, length: float, linear: float) -> Array:
    inner: Array = a @ b.T
    squared = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * inner
    r = np.sqrt(5.0 * np.maximum(squared, 0.0)) / length
    kernel: Array = (1 + r + r * r / 3) * np.exp(-r) + linear * (1 + inner)
    return kernel

"""The slowness of a machine at each moment, estimated from the times of interleaved work. Pure.

Clock rates, other processes and heat make a machine's speed drift by some per cent within seconds. Times of
different moments are comparable only without that drift. The estimate uses a mixed model (Harville, 1977), in
which the logarithm of a sample is

    a constant of its label  +  a random walk over time  +  noise

Restricted maximum likelihood, over a grid, gives the ratio of the walk's variance to that of the noise.
Generalized least squares then gives labels and walk. Outliers are clipped once, so that a single hiccup does
not bend the walk.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Candidates for the variance that the walk gains per sample / the noise's variance. A larger ratio would let
# the walk follow the noise itself: no machine repeats a step that exactly.
_GAINS = (0.0, *np.geomspace(1e-4, 1.0, 13))
# Residuals are clipped to this number of standard deviations.
_CLIP_DEVIATIONS = 3.0


class _Fit(NamedTuple):
    """A fitted model: the walk's level at each sample, and the covariance of the labels' constants.

    `gained` is the variance that the walk gains from the first sample to the last.
    """

    level: FloatArray
    covariance: FloatArray
    gained: float


def drift_factors(labels: Sequence[Hashable], seconds: Sequence[float], at_s: Sequence[float]) -> list[float]:
    """Return the slowness factor of the machine at each sample; their geometric mean is 1.

    Samples with the same label did the same work. Each took `seconds` and ended at time `at_s` (in any
    order). All factors are 1 if no label has two samples.

    >>> drift_factors(["a", "b", "a", "b"], [1.0, 2.0, 1.1, 2.2], [0.0, 1.0, 2.0, 3.0])
    """
    fit = _fit(labels, seconds, at_s)
    if fit is None:
        return [1.0] * len(seconds)
    return [float(value) for value in np.exp(fit.level - fit.level.mean())]


def label_error(labels: Sequence[Hashable], seconds: Sequence[float], at_s: Sequence[float]) -> float:
    """Return the relative standard error of labels' times against each other, as root mean square.

    Infinite if no label has two samples.
    """
    fit = _fit(labels, seconds, at_s)
    if fit is None:
        return np.inf
    num = len(fit.covariance)
    return float(np.sqrt(np.trace(fit.covariance) / num - fit.covariance.sum() / num**2))


def walk_rate(labels: Sequence[Hashable], seconds: Sequence[float], at_s: Sequence[float]) -> float:
    """Return the variance that the logarithm of the machine's slowness gains per second.

    It is the likelihood-weighted mean over the grid. The deviation of the observed path would be less
    certain: for a random walk, it is as uncertain as that of three numbers. 0 if no label has two samples.

    >>> walk_rate(["a", "b", "a", "b"], [1.0, 2.0, 1.1, 2.2], [0.0, 1.0, 2.0, 3.0])
    """
    fit = _fit(labels, seconds, at_s)
    return fit.gained / ((max(at_s) - min(at_s)) or 1.0) if fit is not None else 0.0


def _fit(labels: Sequence[Hashable], seconds: Sequence[float], at_s: Sequence[float]) -> _Fit | None:
    """Fit labels, walk and noise; return None if no label has two samples."""
    names = list(dict.fromkeys(labels))
    num = len(seconds)
    if num == len(names):
        return None
    design = np.zeros((num, len(names)))
    design[np.arange(num), [names.index(label) for label in labels]] = 1.0
    log = np.log(np.maximum(np.asarray(seconds, dtype=np.float64), 1e-12))
    when = np.asarray(at_s, dtype=np.float64)
    when = when - when.min()
    span = float(when.max()) or 1.0
    walk = np.minimum.outer(when, when) * (num / span)  # covariance of a walk with variance 1 per sample
    rest = log - _walk(log, design, walk).level
    rest -= design @ np.linalg.lstsq(design, rest, rcond=None)[0]
    limit = _CLIP_DEVIATIONS * 1.4826 * float(np.median(np.abs(rest)))
    return _walk(log - rest + np.clip(rest, -limit, limit), design, walk)


def _walk(log: FloatArray, design: FloatArray, walk: FloatArray) -> _Fit:
    """Return the fit of greatest likelihood, with the likelihood-weighted mean of `gained`."""
    num, num_labels = design.shape
    level, labels = np.zeros(num), np.zeros((num_labels, num_labels))
    likelihoods: list[float] = []
    gained: list[float] = []
    for gain in _GAINS:
        covariance = gain * walk + np.eye(num)
        weighted = np.linalg.solve(covariance, np.column_stack([design, log]))
        inner = design.T @ weighted[:, :-1]
        typical = np.linalg.solve(inner, design.T @ weighted[:, -1])
        left = weighted[:, -1] - weighted[:, :-1] @ typical
        squares = max(float((log - design @ typical) @ left), 1e-24)
        likelihood = -0.5 * (
            np.linalg.slogdet(covariance)[1]
            + np.linalg.slogdet(inner)[1]
            + (num - num_labels) * np.log(squares)
        )
        noise = squares / (num - num_labels)
        if likelihood > max(likelihoods, default=-np.inf):
            level, labels = gain * (walk @ left), noise * np.linalg.inv(inner)
        likelihoods.append(float(likelihood))
        gained.append(float(gain * noise * num))
    weights = np.exp(np.array(likelihoods) - max(likelihoods))
    return _Fit(level, labels, float(weights @ gained / weights.sum()))

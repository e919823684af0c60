"""How slow a machine was at each moment, from the times of things that took turns on it. Pure.

Clock rates, neighbours and heat make a machine wander by some per cent within seconds, and what is measured
at another moment cannot be compared before that is taken out. The model (ours; a mixed model as of Harville,
1977): the logarithm of a sample is

    what is typical of its label  +  a random walk over time  +  noise

The variance of the walk against that of the noise is what makes the samples most likely (restricted maximum
likelihood, over a grid), labels and walk then follow by generalized least squares. A sample that still lies
far off is drawn near, once, so that a single hiccup does not bend the walk.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Variance that the walk gains from a sample to the next, in variances of the noise.
_GAINS = (0.0, *np.geomspace(1e-4, 1e4, 25))
# Samples farther off than so many standard deviations are drawn near.
_FAR = 3.0


def pace(labels: Sequence[Hashable], seconds: Sequence[float], at_s: Sequence[float]) -> list[float]:
    """How slow the machine was at each sample: a factor; their geometric mean is 1.

    `labels` say which samples are of the same work, `seconds` what each took, `at_s` when (any order). Where
    no label has two samples nothing can be told apart, and all are 1.

    >>> slow = pace(["a", "b", "a", "b"], [1.0, 2.0, 1.1, 2.2], [0.0, 1.0, 2.0, 3.0])
    """
    names = list(dict.fromkeys(labels))
    num = len(seconds)
    if num == len(names):
        return [1.0] * num
    design = np.zeros((num, len(names)))
    design[np.arange(num), [names.index(label) for label in labels]] = 1.0
    log = np.log(np.maximum(np.asarray(seconds, dtype=np.float64), 1e-12))
    when = np.asarray(at_s, dtype=np.float64)
    when = when - when.min()
    span = float(when.max()) or 1.0
    walk = np.minimum.outer(when, when) * (num / span)  # covariance of a walk that gains 1 a sample
    level = _walk(log, design, walk)
    rest = log - level
    rest -= design @ np.linalg.lstsq(design, rest, rcond=None)[0]
    far = _FAR * 1.4826 * float(np.median(np.abs(rest)))
    level = _walk(log - rest + np.clip(rest, -far, far), design, walk)
    return [float(value) for value in np.exp(level - level.mean())]


def _walk(log: FloatArray, design: FloatArray, walk: FloatArray) -> FloatArray:
    """The walk's level at each sample, at the gain that makes the samples most likely."""
    num, num_labels = design.shape
    best, found = -np.inf, np.zeros(num)
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
        if likelihood > best:
            best, found = likelihood, gain * (walk @ left)
    return found

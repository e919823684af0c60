"""The 95 % confidence interval of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import sem
from scipy.stats import t as student


def half_width(values: Sequence[float]) -> float:
    """Return the half width of the mean's 95 % interval (Student's t); infinite for one value.

    >>> half_width([1.0, 2.0, 3.0])
    """
    if len(values) < 2:
        return math.inf
    return float(student.ppf(0.975, len(values) - 1) * sem(values))

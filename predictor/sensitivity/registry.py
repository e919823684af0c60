"""The indicators by name, as `qsync.sensitivity(..., indicator=NAME)` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qsync.errors import UnsupportedError, nearest, shortened
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.empirical import empirical
from qsync.predictor.sensitivity.other_indicators.fisher import fisher
from qsync.predictor.sensitivity.other_indicators.hessian import hessian
from qsync.predictor.sensitivity.other_indicators.qsync_depth import qsync_depth
from qsync.predictor.sensitivity.other_indicators.random_scores import random_scores
from qsync.predictor.sensitivity.other_indicators.weight_rounding import weight_rounding
from qsync.predictor.sensitivity.variance import variance
from qsync.records.profiles import Sensitivity

Indicator = Callable[[Calibration], Sensitivity]

INDICATORS: Mapping[str, Indicator] = {
    "variance": variance,
    "empirical": empirical,
    "depth": qsync_depth,
    "fisher": fisher,
    "hessian": hessian,
    "weight": weight_rounding,
    "random": random_scores,
}


def indicator_named(name: str) -> Indicator:
    """Return the indicator called `name`; UnsupportedError with the nearest name if there is none.

    >>> indicator_named("varience")
    UnsupportedError: there is no indicator 'varience' (nearest: 'variance'); choose one of ...
    """
    if not isinstance(name, str) or name not in INDICATORS:
        close, known = nearest(str(name), INDICATORS), ", ".join(INDICATORS)
        raise UnsupportedError(f"there is no indicator {shortened(name)}{close}; choose one of {known}")
    return INDICATORS[name]

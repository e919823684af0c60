"""The indicators by name: what `qsync.sensitivity(..., indicator=NAME)` may ask for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from qsync.errors import UnsupportedError
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.empirical import empirical
from qsync.predictor.sensitivity.peers.fisher import fisher
from qsync.predictor.sensitivity.peers.hessian import hessian
from qsync.predictor.sensitivity.peers.qsync_depth import depth
from qsync.predictor.sensitivity.peers.random_scores import drawn
from qsync.predictor.sensitivity.peers.weight_rounding import weight
from qsync.predictor.sensitivity.variance import variance
from qsync.records.profiles import Sensitivity

Indicator = Callable[[Calibration], Sensitivity]

INDICATORS: Mapping[str, Indicator] = {
    "variance": variance,
    "empirical": empirical,
    "depth": depth,
    "fisher": fisher,
    "hessian": hessian,
    "weight": weight,
    "random": drawn,
}


def indicator_named(name: str) -> Indicator:
    """The indicator called `name`; UnsupportedError with the nearest name if there is none.

    >>> indicator_named("varience")
    UnsupportedError: there is no indicator 'varience' (nearest: 'variance'); choose one of ...
    """
    if name not in INDICATORS:
        nearest = difflib.get_close_matches(name, list(INDICATORS), n=1, cutoff=0.0)[0]
        known = ", ".join(INDICATORS)
        raise UnsupportedError(
            f"there is no indicator {name!r} (nearest: {nearest!r}); choose one of {known}"
        )
    return INDICATORS[name]

"""Random numbers: the baseline that every indicator has to beat."""

from __future__ import annotations

import random

from qsync.predictor.sensitivity.calibration import Calibration
from qsync.records.precision import MANTISSA_BITS, Precision
from qsync.records.profiles import Sensitivity

_INT8_STEP = 1 / 127


def random_scores(calibration: Calibration) -> Sensitivity:
    """Draw omega[op][p] = u_op s_p^2/12: u uniform in (0, 1), s the step of the precision at 1.

    Lower precisions cost more; the order of the operators is drawn from the seed. Takes one forward pass on
    one batch, to trace the operators.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="random", seed=1)
    """
    calibration.assign({})
    calibration.forward(0)
    graph = calibration.runner.graph
    omega = calibration.zeros(graph)
    draw = random.Random(calibration.seed)
    factors = {name: 1 - draw.random() for name in omega}
    for name, modes in omega.items():
        for mode in modes:
            modes[mode] = factors[name] * _step(Precision(mode)) ** 2 / 12
    return Sensitivity(graph.hash, "random", omega, len(calibration.losses))


def _step(precision: Precision) -> float:
    if precision in (Precision.INT8, Precision.INT8_ALL):
        return _INT8_STEP * (2**0.5 if precision is Precision.INT8_ALL else 1.0)
    return float(2.0 ** -MANTISSA_BITS[precision])

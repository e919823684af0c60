"""The variance that rounding adds to an operator's weight, and nothing else.

    omega[op][p] = |Q_p(w) - w|^2

Needs no gradient, and knows neither activations nor what the loss makes of either: products of activations
score zero.
"""

from __future__ import annotations

from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.operand_gradients import Edges, Scores, rounded
from qsync.predictor.sensitivity.rounding import rounding_error
from qsync.records.profiles import Sensitivity


def weight(calibration: Calibration) -> Sensitivity:
    """Squared rounding error of each operator's parameters: one FP32 step per batch, to meet them in.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="weight")
    """
    edges, scores = Edges(), Scores()
    calibration.assign({}, edges)
    for batch in range(len(calibration.losses)):
        for edge in edges.of_step(calibration, batch):
            for precision, type_name in rounded(calibration, edge) if edge.is_parameter else ():
                scores.add(edge.op, precision, rounding_error(edge.value, type_name).square().sum())
    return scores.sensitivity(calibration, "weight")

"""The squared rounding error of an operator's weight, and nothing else.

    omega[op][p] = |Q_p(w) - w|^2

It needs no gradient and ignores activations and the loss: products of activations score zero.
"""

from __future__ import annotations

from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.operand_gradients import Edges, Scores, rounded
from qsync.predictor.sensitivity.rounding import rounding_error
from qsync.records.profiles import Sensitivity


def weight_rounding(calibration: Calibration) -> Sensitivity:
    """Score the squared rounding error of each operator's parameters: one FP32 step per batch.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="weight")
    """
    edges, scores = Edges(), Scores()
    calibration.assign({}, edges)
    for batch in range(len(calibration.losses)):
        for edge in edges.of_step(calibration, batch):
            for precision, type_name in rounded(calibration, edge) if edge.is_parameter else ():
                scores.add(edge.op, precision, rounding_error(edge.value, type_name).square().sum())
    return scores.sensitivity(calibration, "weight")

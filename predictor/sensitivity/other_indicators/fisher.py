"""First-order sensitivity of the loss: the diagonal Fisher information, as NVIDIA's ModelOpt scores layers.

    omega[op][p] = sum over operands x of  sum (dL/dx)^2 e^2,     e the rounding error of x at p

This is the expected squared change of the loss by independent errors of these sizes. ModelOpt takes the error
of the operator's output instead; dL/dx = (dL/dy) W' moves the same score to the rounded operand. The score is
about the loss, not about its gradient.
"""

from __future__ import annotations

from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.operand_gradients import Edges, Scores, rounded
from qsync.predictor.sensitivity.rounding import rounding_error
from qsync.records.profiles import Sensitivity


def fisher(calibration: Calibration) -> Sensitivity:
    """Score the squared change of the loss: one FP32 step per batch.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="fisher")
    """
    edges, scores = Edges(), Scores()
    calibration.assign({}, edges)
    for batch in range(len(calibration.losses)):
        for edge in edges.of_step(calibration, batch):
            for precision, type_name in rounded(calibration, edge):
                change = edge.gradient * rounding_error(edge.value, type_name)
                scores.add(edge.op, precision, change.square().sum())
    return scores.sensitivity(calibration, "fisher")

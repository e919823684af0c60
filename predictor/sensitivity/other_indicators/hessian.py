"""Second-order sensitivity of the loss: trace of the Hessian of each weight (HAWQ-V2, arXiv:1911.03852).

    omega[op][p] = |tr(H_w)| / n  |Q_p(w) - w|^2,      w of n elements
    tr(H_w)      = E r' H r  =  E r' [dL/dw (theta + eps r) - dL/dw (theta)] / eps      (Hutchinson)

with one random sign per parameter. Terms between different weights have mean zero. Only the rounding of
weights counts, so products of activations score zero.
"""

from __future__ import annotations

from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.operand_gradients import Edges, Scores, rounded
from qsync.predictor.sensitivity.rounding import rounding_error
from qsync.records.profiles import Sensitivity

STEP = 3e-3  # relative to the root mean square of all parameters


def hessian(calibration: Calibration) -> Sensitivity:
    """Score loss curvature times squared weight error: two FP32 steps per batch.

    The trace is averaged over batches before its magnitude is taken.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="hessian")
    """
    edges, scores = Edges(), Scores()
    calibration.assign({}, edges)
    for batch in range(len(calibration.losses)):
        here = [edge for edge in edges.of_step(calibration, batch) if edge.is_parameter]
        with calibration.perturbed(batch, STEP) as eps:
            there = [edge for edge in edges.of_step(calibration, batch) if edge.is_parameter]
        for edge, moved in zip(here, there, strict=True):
            trace = ((moved.value - edge.value) * (moved.gradient - edge.gradient)).sum() / eps.square()
            for precision, type_name in rounded(calibration, edge):
                error = rounding_error(edge.value, type_name).square().mean()
                scores.add(edge.op, precision, trace * error)
    return scores.sensitivity(calibration, "hessian")

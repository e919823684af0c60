"""The empirical indicator: the error of the gradient, measured with the real kernels.

    omega[op][p] = E |g_hat - g|^2

g is the FP32 gradient of all parameters on one batch, and g_hat the gradient with a single operator in
precision p. The mean is over batches and, for stochastic rounding, over draws. Each operator and precision
takes one pass per batch and draw. Other indicators estimate the same quantity from far fewer passes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from qsync.errors import CalibrationError
from qsync.operators.precision import STOCHASTIC, Precision
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.records.profiles import Sensitivity

# Draws of a stochastic rounding per batch. The error of one draw is a sum over all parameters and varies
# little between draws; batches differ by more.
DRAWS = 2


def empirical(calibration: Calibration) -> Sensitivity:
    """Measure E|g_hat - g|^2 of each adjustable operator in each precision.

    Takes one FP32 step per batch, and one step per batch, operator and precision (two for stochastic
    rounding). All steps draw the same random numbers in forward, so that dropout does not add to the
    difference. On GPUs, INT8 attention draws its dropout from other random numbers than torch, so measure
    such models there without dropout. Raises CalibrationError for a gradient that is NaN or Inf, naming the
    operator and the precision.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="empirical", precisions=["bf16", "int8"])
    """
    calibration.assign({})
    calibration.forward(0)
    graph = calibration.runner.graph
    omega = calibration.zeros(graph)
    flips = list(calibration.lowered(graph))
    errors = gradient_errors(calibration, [{name: precision} for name, precision in flips])
    for (name, precision), error in zip(flips, errors, strict=True):
        omega[name][str(precision)] = error
    return Sensitivity(graph.hash, "empirical", omega, len(calibration.losses))


def gradient_errors(
    calibration: Calibration, assignments: Sequence[Mapping[str, Precision]], draws: int = DRAWS
) -> list[float]:
    """Measure E|g_hat - g|^2 under each assignment: the joint effect of its lowered operators.

    Unit: squared gradient norm, averaged over the calibration's batches.

    >>> gradient_errors(calibration, [{"fc1": Precision.INT8}, {"fc2": Precision.BF16}])
    """
    return [statistics.fmean(errors) for errors in errors_by_batch(calibration, assignments, draws)]


def errors_by_batch(
    calibration: Calibration, assignments: Sequence[Mapping[str, Precision]], draws: int = DRAWS
) -> list[list[float]]:
    """Measure |g_hat - g|^2 per batch under each assignment, for example to compute standard errors.

    >>> errors_by_batch(calibration, [{"fc1": Precision.INT8}])
    [[0.021, 0.018, 0.027]]
    """
    batches = range(len(calibration.losses))
    calibration.assign({})
    exact = [calibration.gradient(batch) for batch in batches]
    return [_errors(calibration, assignment, exact, draws) for assignment in assignments]


def _errors(
    calibration: Calibration,
    assignment: Mapping[str, Precision],
    exact: Sequence[Sequence[torch.Tensor]],
    draws: int,
) -> list[float]:
    """Return |g_hat - g|^2 on each batch under an assignment; `exact` has the FP32 gradients."""
    calibration.assign(assignment)
    drawn = range(draws if any(p.facts.gradient == STOCHASTIC for p in assignment.values()) else 1)
    lowered = ", ".join(f"{name} in {precision}" for name, precision in assignment.items())
    advice = "clean the batch, or leave that precision out"
    try:
        found = [
            torch.stack([_distance(calibration.gradient(batch, draw), gradient) for draw in drawn]).mean()
            for batch, gradient in enumerate(exact)
        ]
    except CalibrationError as error:  # the same batches have finite losses in FP32
        raise CalibrationError(f"with {lowered} the loss is NaN or Inf; {advice}") from error
    errors: list[float] = torch.stack(found).tolist()
    if not all(map(math.isfinite, errors)):
        raise CalibrationError(f"with {lowered} the gradient is NaN or Inf; {advice}")
    return errors


def _distance(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return |got - expected|^2 over all parameters, summed in FP64 as it has millions of terms."""
    parts = [(a - b).square().sum(dtype=torch.float64) for a, b in zip(got, expected, strict=True)]
    return torch.stack(parts).sum()

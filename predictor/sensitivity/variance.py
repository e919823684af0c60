"""Variance indicator: the gradient variance that lowering one operator adds, from two steps per batch.

Lowering an operator rounds its operands, its result, and the gradients that it receives and sends back. Each
rounding moves the gradient of all parameters. qsync.predictor.sensitivity.directional_probe estimates these
movements. The errors are uncorrelated, so their squares add up:

    omega = sum over operands x   |A_x e(x)|^2         e: the rounding error of the precision's type
          + result y              |A_y e(y)|^2
          + gradient g of y       |B_y e(g)|^2
          + gradients sent back   |B_x e(dL/dx)|^2

The terms of y and g are also added for every following operator that then runs in 16 bits. QSync
(arXiv:2407.02327, section 4) has the same sources of error and weights their downstream and upstream effects
by depth. Here the effects are measured and need no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qsync.operators.precision import STOCHASTIC, Precision
from qsync.predictor.sensitivity.calibration import Calibration, below_fp32, mean_over_batches
from qsync.predictor.sensitivity.directional_probe import (
    RESULT,
    Probe,
    RoundingEffects,
    rounded_results,
)
from qsync.predictor.sensitivity.rounding import rounded_to
from qsync.records.base import SIXTEEN_BIT
from qsync.records.graph import Op, OpGraph
from qsync.records.profiles import Sensitivity


def variance(calibration: Calibration) -> Sensitivity:
    """Estimate the sensitivity of each adjustable operator in each precision, averaged over batches.

    Takes two FP32 steps (forward and backward) per batch, and one copy to the host. Raises CalibrationError
    for NaN or Inf in the data, naming the first operator with it, and for a gradient that is zero. Raises
    UnsupportedError for an operator that the first batch does not reach.

    >>> qsync.sensitivity(model, batches, loss_fn)
    """
    probe = Probe(calibration.precisions)
    calibration.assign({}, probe)
    effects = [probe.measure(calibration, batch) for batch in range(len(calibration.losses))]
    graph = probe.graph
    assert graph is not None, "there is a batch, and the first shows the graph"
    rounded = rounded_results(graph)
    found = [indicator(graph, each, calibration.precisions, rounded) for each in effects]
    return Sensitivity(graph.hash, "variance", mean_over_batches(found), len(found))


def indicator(
    graph: OpGraph,
    effects: RoundingEffects,
    precisions: Sequence[Precision],
    rounded: Mapping[str, Iterable[str]],
) -> dict[str, dict[str, float]]:
    """Return omega[op][precision] of one batch; `rounded` comes from `rounded_results`. Pure.

    Omega is 0 for an operator that backward never reached.
    """
    return {
        op.name: {
            str(p): _omega(op, p, effects, rounded.get(op.name, ())) for p in below_fp32(op.kind, precisions)
        }
        for op in graph.adjustable
    }


def _omega(op: Op, precision: Precision, effects: RoundingEffects, rounded: Iterable[str]) -> float:
    """Return the summed effects of all roundings of one operator in one precision."""
    operands = range(len(op.inputs))

    def value(index: int, type_name: str, name: str = op.name) -> float:
        return effects.values.get((name, index, type_name), 0.0)

    def gradient(index: int, type_name: str, name: str = op.name) -> float:
        return effects.gradients.get((name, index, type_name), 0.0)

    total = sum(value(i, rounded_to(op.kind, i, precision)) for i in operands)
    to = precision.facts.gradient
    if to == STOCHASTIC:
        return total + sum(gradient(i, STOCHASTIC) for i in operands)
    if to not in SIXTEEN_BIT:
        return total + gradient(RESULT, to)
    # Products of 16 bits return gradients in 16 bits.
    total += gradient(RESULT, to) + sum(gradient(i, to) for i in operands)
    if precision is Precision.FP16 or (precision is Precision.INT8 and op.kind == "attention"):
        total += value(RESULT, to)  # INT8 attention multiplies by V in 16 bits
    if precision is Precision.BF16:
        total += sum(value(RESULT, "bf16", name) for name in rounded)
        total += sum(gradient(RESULT, "bf16", name) for name in rounded if name != op.name)
    return total

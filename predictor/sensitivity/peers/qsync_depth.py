"""QSync's indicator: the same sources of error as `variance`, weighed by depth.

For y = x W (x: M x K, W: K x N, g = dL/dy) with per-element rounding variances v_x, v_w, v_g (QSync,
arXiv:2407.02327, Section 4; squared Frobenius norms throughout):

    forward   E|dy|^2      = v_x M |W|^2 + v_w N |x|^2
    wgrad     E|d(x'g)|^2  = v_x K |g|^2 + v_g N |x|^2
    dgrad     E|d(gW')|^2  = v_g M |W|^2 + v_w K |g|^2

The wgrad term is gradient variance already. The other two are errors of an activation and of its gradient;
with G the squared norm of the whole gradient, L the depth of the model and d the operator's own (QSync's
depth weights, made commensurate; the conversion is ours):

    omega = wgrad + G [ (L - d)/L  forward / |y|^2  +  d/L  dgrad / |gW'|^2 ]

A relative error of y is taken to change the gradient of everything downstream by the same relative amount,
and a relative error of gW' everything upstream: true of a chain, not of a residual stream or behind a norm.
|gW'|^2 is taken as |g|^2 |W|^2 / N, its value for directions in general position.

An embedding, y = S W with S the lookups (M rows, each with a single 1), multiplies nothing and has nothing
upstream:

    forward   E|dy|^2      = v_y M K
    wgrad     E|d(S'g)|^2  = v_g M K                                                               (ours)

v_y is of the rows that were looked up; the rounding errors of gradients that go to one row add up there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsync.predictor.profiling.runner import check_finite
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.peers.operand_statistics import Gatherer, OpStatistics
from qsync.records.graph import Op, OpGraph, num_elements
from qsync.records.precision import PRECISIONS_BY_KIND, Precision, operand_type, rounded_type
from qsync.records.profiles import Sensitivity


def depth(calibration: Calibration) -> Sensitivity:
    """Sensitivity of each adjustable operator at each precision, averaged over calibration batches.

    One FP32 step per batch. Raises CalibrationError for NaN or Inf in the data, naming the operator that met
    it first.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="depth")
    """
    totals: dict[str, dict[str, float]] = {}
    num = len(calibration.losses)
    for batch in range(num):
        gatherer = Gatherer(calibration.precisions)
        calibration.assign({}, gatherer)
        loss = calibration.forward(batch)
        graph = calibration.runner.graph
        gatherer.describe(graph)
        found = calibration.backward(loss, batch)
        gatherer.check_finite(graph)
        check_finite(loss)
        gradient = sum(float(part.double().square().sum()) for part in found)
        omega = indicator(graph, gatherer.statistics(), gradient, calibration.precisions)
        for name, modes in omega.items():
            entry = totals.setdefault(name, dict.fromkeys(modes, 0.0))
            for mode, added in modes.items():
                entry[mode] += added / num
    return Sensitivity(graph.hash, "depth", totals, num)


def indicator(
    graph: OpGraph, statistics: dict[str, OpStatistics], gradient: float, precisions: Sequence[Precision]
) -> dict[str, dict[str, float]]:
    """omega[op][precision] of one batch, from its statistics and the squared norm of its gradient. Pure."""
    depth = max((op.depth for op in graph.adjustable), default=1)
    omega: dict[str, dict[str, float]] = {}
    for op in graph.adjustable:
        found = statistics.get(op.name)
        usable = [p for p in precisions if p in PRECISIONS_BY_KIND[op.kind] and p is not Precision.FP32]
        if found is None:  # never reached: it adds nothing
            omega[op.name] = dict.fromkeys(map(str, usable), 0.0)
            continue
        omega[op.name] = {str(p): _omega(op, p, found, gradient, depth) for p in usable}
    return omega


def _omega(op: Op, precision: Precision, found: OpStatistics, gradient: float, depth: int) -> float:
    terms = product_terms(op, precision, found)
    downstream, upstream = (depth - op.depth) / depth, op.depth / depth
    return terms.wgrad + gradient * (downstream * terms.forward + upstream * terms.dgrad)


@dataclass(frozen=True, slots=True)
class Terms:
    """`forward` and `dgrad` relative to |y|^2 and |gW'|^2, `wgrad` in squared gradient norm."""

    forward: float
    wgrad: float
    dgrad: float


def product_terms(op: Op, precision: Precision, found: OpStatistics) -> Terms:
    """The three terms of the module's equation for one operator at one precision. Pure."""
    if op.kind in ("matmul", "attention"):
        return _activation_terms(op, precision, found)
    if op.kind == "embedding":
        return _lookup_terms(op, precision, found)
    x, w = (1, 2) if op.kind == "addmm" else (0, 1)
    v_x = found.rounding[x][operand_type(op.kind, x, precision)]
    v_w = found.rounding[w][operand_type(op.kind, w, precision)]
    v_g = found.gradient_rounding[gradient_type(precision)]
    m, k, n = _sizes(op, found)
    x2, w2, g2, y2 = (
        found.squares[x] * _window(op, found),
        found.squares[w],
        found.gradient_square,
        found.output_square,
    )
    forward = (v_x * m * w2 + v_w * n * x2) / y2 if y2 else 0.0
    wgrad = v_x * k * g2 + v_g * n * x2 if found.weight_trains else 0.0
    dgrad = (v_g * m * n / g2 if g2 else 0.0) + (v_w * k * n / w2 if w2 else 0.0)
    return Terms(forward, wgrad, dgrad)


def _activation_terms(op: Op, precision: Precision, found: OpStatistics) -> Terms:
    """Products of activations: relative rounding variances of what enters, each of which the result repeats
    (ours).
    """
    relative = 0.0
    for j, square in enumerate(found.squares[: 3 if op.kind == "attention" else 2]):
        size = num_elements(found.shapes[j])
        relative += found.rounding[j][operand_type(op.kind, j, precision)] * size / square if square else 0.0
    g2, size = found.gradient_square, num_elements(op.shape)
    backward = found.gradient_rounding[gradient_type(precision)] * size / g2 if g2 else 0.0
    return Terms(relative, 0.0, relative + backward)


def _lookup_terms(op: Op, precision: Precision, found: OpStatistics) -> Terms:
    """An embedding's: its rows are rounded, and so is the gradient that it adds up."""
    size = num_elements(op.shape)
    v_y = found.rounding[0][rounded_type(op.kind, 0, precision)]
    v_g = found.gradient_rounding[gradient_type(precision)] if found.weight_trains else 0.0
    return Terms(v_y * size / found.output_square if found.output_square else 0.0, v_g * size, 0.0)


def gradient_type(precision: Precision) -> str:
    """The type in which an operator's backward products take the gradient."""
    if precision in (Precision.INT8_ALL, Precision.FP8):
        return {Precision.INT8_ALL: "int8_stochastic", Precision.FP8: "e5m2"}[precision]
    if precision is Precision.INT8:
        return "bf16"
    return str(precision)


def _sizes(op: Op, found: OpStatistics) -> tuple[int, int, int]:
    """M, K, N of a product with a weight: rows (or positions), contracted size, output channels."""
    if op.kind == "linear":
        n, k = found.shapes[1]
        return num_elements(op.shape) // max(n, 1), k, n
    if op.kind == "addmm":
        k, n = found.shapes[2]
        return num_elements(op.shape) // max(n, 1), k, n
    n, k = found.shapes[1][0], num_elements(found.shapes[1][1:])
    return num_elements(op.shape) // max(n, 1), k, n


def _window(op: Op, found: OpStatistics) -> float:
    """How often a convolution reads each element of its input, on average; 1 for other products."""
    if not op.kind.startswith("conv"):
        return 1.0
    positions = num_elements(op.shape[2:]) / max(num_elements(found.shapes[0][2:]), 1)
    groups = found.shapes[0][1] / max(found.shapes[1][1], 1)
    return positions * num_elements(found.shapes[1][2:]) / max(groups, 1.0)

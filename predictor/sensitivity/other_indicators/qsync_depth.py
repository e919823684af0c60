"""QSync's indicator: the same sources of error as `variance`, weighted by depth.

For y = x W (x: M x K, W: K x N, g = dL/dy) with per-element rounding variances v_x, v_w, v_g (QSync,
arXiv:2407.02327, Section 4; squared Frobenius norms throughout):

    forward   E|dy|^2      = v_x M |W|^2 + v_w N |x|^2
    wgrad     E|d(x'g)|^2  = v_x K |g|^2 + v_g N |x|^2
    dgrad     E|d(gW')|^2  = v_g M |W|^2 + v_w K |g|^2

The wgrad term is already a variance of the parameters' gradient. The forward term is an error of y, and the
dgrad term an error of the gradient of x. QSync's depth weights convert both to a variance of the gradient.
(Both terms are taken relative, so that the units agree.) With G the squared norm of the whole gradient, L the
depth of the model and d the depth of the operator:

    omega = wgrad + G [ (L - d)/L  forward / |y|^2  +  d/L  dgrad / |gW'|^2 ]

The formula assumes that a relative error of y changes all gradients downstream by the same relative amount,
and that a relative error of gW' changes all gradients upstream so. Both assumptions hold in a chain, but not
in a residual stream or behind a norm. |gW'|^2 is taken as |g|^2 |W|^2 / N, its value for random directions.

An embedding, y = S W with S the lookups (M rows, each with a single 1), multiplies nothing and has nothing
upstream:

    forward   E|dy|^2      = v_y M K
    wgrad     E|d(S'g)|^2  = v_g M K

v_y is the rounding variance of the rows looked up. The gradient of a table's row is the sum of the gradients
of all its lookups, and so is its rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.profiling.runner import check_finite
from qsync.predictor.sensitivity.calibration import Calibration, below_fp32, mean_over_batches
from qsync.records.graph import Op, OpGraph, Role, num_elements
from qsync.records.precision import (
    MANTISSA_BITS,
    ROUNDS_WHAT_IT_READS,
    Precision,
    operand_type,
    rounded_type,
)
from qsync.records.profiles import Sensitivity


def qsync_depth(calibration: Calibration) -> Sensitivity:
    """Estimate the sensitivity of each adjustable operator at each precision, averaged over batches.

    Takes one FP32 step per batch. Raises CalibrationError for NaN or Inf in the data, naming the first
    operator that met a value of this kind.

    >>> qsync.sensitivity(model, batches, loss_fn, indicator="depth")
    """
    omega = []
    for batch in range(len(calibration.losses)):
        gatherer = Gatherer(calibration.precisions)
        calibration.assign({}, gatherer)
        loss = calibration.forward(batch)
        graph = calibration.runner.graph
        gatherer.describe(graph)
        found = calibration.backward(loss, batch)
        gatherer.check_finite(graph)
        check_finite(loss)
        gradient = sum(float(part.double().square().sum()) for part in found)
        omega.append(indicator(graph, gatherer.statistics(), gradient, calibration.precisions))
    return Sensitivity(graph.hash, "depth", mean_over_batches(omega), len(omega))


def indicator(
    graph: OpGraph, statistics: dict[str, OpStatistics], gradient: float, precisions: Sequence[Precision]
) -> dict[str, dict[str, float]]:
    """Return omega[op][precision] of one batch, from its statistics and squared gradient norm. Pure."""
    depth = max((op.depth for op in graph.adjustable), default=1)
    omega: dict[str, dict[str, float]] = {}
    for op in graph.adjustable:
        found = statistics.get(op.name)
        usable = below_fp32(op.kind, precisions)
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
    """The three terms: `forward` and `dgrad` relative to |y|^2 and |gW'|^2, `wgrad` in squared norm."""

    forward: float
    wgrad: float
    dgrad: float


def product_terms(op: Op, precision: Precision, found: OpStatistics) -> Terms:
    """Return the three terms of the module's equation for one operator at one precision. Pure."""
    if op.kind in ("matmul", "baddbmm", "einsum", "grouped_mm", "attention"):
        return _activation_terms(op, precision, found)
    if op.kind == "embedding":
        return _lookup_terms(op, precision, found)
    x, w = factors(op, found.shapes)
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
    """Return the terms of a product of activations, in which its operands' relative variances add up."""
    relative = 0.0
    multiplied = {"attention": (0, 1, 2), "baddbmm": (1, 2)}.get(op.kind, (0, 1))
    for j in multiplied:
        size, square = num_elements(found.shapes[j]), found.squares[j]
        relative += found.rounding[j][operand_type(op.kind, j, precision)] * size / square if square else 0.0
    g2, size = found.gradient_square, num_elements(op.shape)
    backward = found.gradient_rounding[gradient_type(precision)] * size / g2 if g2 else 0.0
    return Terms(relative, 0.0, relative + backward)


def _lookup_terms(op: Op, precision: Precision, found: OpStatistics) -> Terms:
    """Return the terms of an embedding, which rounds the rows looked up and the gradients of all lookups."""
    size = num_elements(op.shape)
    v_y = found.rounding[0][rounded_type(op.kind, 0, precision)]
    v_g = found.gradient_rounding[gradient_type(precision)] if found.weight_trains else 0.0
    return Terms(v_y * size / found.output_square if found.output_square else 0.0, v_g * size, 0.0)


def gradient_type(precision: Precision) -> str:
    """Return the type in which an operator's backward products take the gradient."""
    types = {Precision.INT8: "bf16", Precision.INT8_ALL: "int8_stochastic", Precision.FP8: "e5m2"}
    return types.get(precision, str(precision))


def factors(op: Op, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return the positions of a product's input and weight; of a recurrence, those of its first layer."""
    if op.kind == "rnn":
        return 0, next(j for j, shape in enumerate(shapes) if len(shape) == 2)
    return (1, 2) if op.kind == "addmm" else (0, 1)


def _sizes(op: Op, found: OpStatistics) -> tuple[int, int, int]:
    """Return M, K, N of a product with a weight: rows (or positions), contracted size, output channels."""
    if op.kind == "rnn":
        n, k = found.shapes[factors(op, found.shapes)[1]]
        return num_elements(found.shapes[0][:-1]), k, n
    if op.kind == "linear":
        n, k = found.shapes[1]
        return num_elements(op.shape) // max(n, 1), k, n
    if op.kind == "addmm":
        k, n = found.shapes[2]
        return num_elements(op.shape) // max(n, 1), k, n
    n, k = found.shapes[1][0], num_elements(found.shapes[1][1:])
    if op.kind == "conv_transpose":  # its filters are (input channels, output channels, ...)
        n, k = op.shape[1], num_elements(found.shapes[1]) // max(op.shape[1], 1)
    return num_elements(op.shape) // max(n, 1), k, n


def _window(op: Op, found: OpStatistics) -> float:
    """Return how often a convolution reads each input element on average; 1 for other products."""
    if not op.kind.startswith("conv"):
        return 1.0
    if op.kind == "conv_transpose":  # each element of a group meets every element of its filters
        return num_elements(found.shapes[1][2:]) * found.shapes[1][1] / max(op.shape[1], 1)
    positions = num_elements(op.shape[2:]) / max(num_elements(found.shapes[0][2:]), 1)
    groups = found.shapes[0][1] / max(found.shapes[1][1], 1)
    return positions * num_elements(found.shapes[1][2:]) / max(groups, 1.0)


@dataclass(frozen=True, slots=True)
class OpStatistics:
    """The squared Frobenius norms and rounding variances of one operator on one batch.

    Lists have one entry per rounded value: one per `Op.inputs`, or for an embedding its result alone (the
    rows looked up). An entry of `rounding` maps each type to the variance that rounding the value to this
    type adds, as a mean over elements.
    """

    shapes: list[tuple[int, ...]]
    squares: list[float]
    rounding: list[dict[str, float]]
    output_square: float
    gradient_square: float
    gradient_rounding: dict[str, float]
    weight_trains: bool


@dataclass(slots=True)
class _DeviceStatistics:
    """The fields of `OpStatistics` as tensors on the device: no copies to the host during the pass."""

    shapes: list[tuple[int, ...]]
    squares: list[torch.Tensor]
    rounding: list[dict[str, torch.Tensor]]
    output_square: torch.Tensor
    weight_trains: bool
    gradient_square: torch.Tensor | None = None
    gradient_rounding: dict[str, torch.Tensor] = field(default_factory=dict)


class Gatherer:
    """An Observer (see qsync.runtime.rewriting) of one FP32 step."""

    def __init__(self, precisions: Sequence[Precision]) -> None:
        self._precisions = [p for p in precisions if p is not Precision.FP32]
        self._raw: dict[str, _DeviceStatistics] = {}
        self._pending: list[tuple[str, torch.Tensor, tuple[Any, ...]]] = []

    def began(self) -> None:
        """Do nothing: statistics have no order."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Hold an operator's operands and result until `describe` gets the graph."""
        if isinstance(result, tuple):  # of a recurrence: the states are part of the sequence
            result = result[0]
        if isinstance(node, Run) and node.mode == "fp32" and isinstance(result, torch.Tensor):
            self._pending.append((node.op, result, operands))

    def describe(self, graph: OpGraph) -> None:
        """Take the statistics of every adjustable operator that ran, and hook its gradient to take more."""
        ops = {op.name: op for op in graph.ops if op.role is Role.ADJUSTABLE}
        with torch.no_grad():
            for name, result, operands in self._pending:
                if name in ops:
                    self._raw[name] = self._take(ops[name], result, operands)
        for name, result, _ in self._pending:
            if name in ops and result.requires_grad:
                result.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, name=name: self._take_gradient(name, gradient)
                )
        self._pending.clear()

    def _take(self, op: Op, result: torch.Tensor, operands: tuple[Any, ...]) -> _DeviceStatistics:
        usable = below_fp32(op.kind, self._precisions)
        shapes = [tuple(tensor.shape) for tensor in operands]
        weight = operands[factors(op, shapes)[1]] if len(operands) > 1 else None
        trains = isinstance(weight, torch.nn.Parameter) and weight.requires_grad
        rounded = (result,) if op.kind in ROUNDS_WHAT_IT_READS else operands
        rounding = [
            {
                t: rounding_variance(tensor, t)
                for t in {rounded_type(op.kind, j, p) for p in usable}
                if t != "fp32"
            }
            for j, tensor in enumerate(rounded)
        ]
        for entry in rounding:
            entry["fp32"] = torch.zeros(())
        squares = [tensor.float().square().sum() for tensor in rounded]
        return _DeviceStatistics(
            [tuple(t.shape) for t in rounded], squares, rounding, result.float().square().sum(), trains
        )

    def _take_gradient(self, name: str, gradient: torch.Tensor) -> None:
        raw = self._raw[name]
        with torch.no_grad():
            raw.gradient_square = gradient.float().square().sum()
            types = {gradient_type(p) for p in self._precisions}
            raw.gradient_rounding = {t: rounding_variance(gradient, t) for t in types}

    def check_finite(self, graph: OpGraph) -> None:
        """Raise CalibrationError with the first operator, in model order, that met NaN or Inf."""
        for op in graph.ops:
            raw = self._raw.get(op.name)
            if raw is not None and not all(
                bool(square.isfinite()) for square in (*raw.squares, raw.output_square)
            ):
                raise CalibrationError(
                    f"{op.name} met NaN or Inf in the calibration data; clean the batch or the weights "
                    "before planning"
                )

    def statistics(self) -> dict[str, OpStatistics]:
        """Return the statistics of every adjustable operator that ran, as numbers."""
        found = {}
        for name, raw in self._raw.items():
            found[name] = OpStatistics(
                raw.shapes,
                [float(square) for square in raw.squares],
                [{t: float(v) for t, v in entry.items()} for entry in raw.rounding],
                float(raw.output_square),
                float(raw.gradient_square) if raw.gradient_square is not None else 0.0,
                {t: float(v) for t, v in raw.gradient_rounding.items()} or _Zeros(),
                raw.weight_trains,
            )
        return found


class _Zeros(dict[str, float]):
    """The rounding variances of a gradient that never arrived: all zero."""

    def __missing__(self, key: str) -> float:
        return 0.0


def rounding_variance(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return the mean over elements of the variance that rounding to a type adds.

    Nearest rounding with step s adds s^2/12 per element, stochastic rounding s^2/6. INT8 has s = amax/127 per
    row (of the last dimension), column, image or channel; a float of m mantissa bits has
    s = 2^(floor(log2|x|) - m).

    >>> rounding_variance(torch.ones(2, 4), "int8_row")   # (1/127)^2 / 12
    """
    x = tensor.detach().float()
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    if type_name.startswith(("int8", "fp8_row", "fp8_col")):
        return _scaled_variance(x, type_name)
    bits = {"e5m2": 2, **MANTISSA_BITS}[type_name]
    _, exponent = torch.frexp(x)  # x = m 2^e with m in [0.5, 1), so floor(log2|x|) = e - 1
    step = torch.ldexp((x != 0).float(), exponent - 1 - bits)
    return step.square().mean() / 12


def _scaled_variance(x: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return the mean variance that rounding to an encoding with scales adds (INT8 and FP8)."""
    prefix, _, layout = type_name.partition("_")
    if layout in ("image", "channel"):
        rows = x.flatten(1)
    else:
        rows = x.mT if layout in ("col", "inner") and x.ndim > 1 else x
    amax = rows.abs().amax(-1)
    if prefix == "int8":
        return (amax / 127).square().mean() / (6 if layout == "stochastic" else 12)
    scaled = rows / (amax.clamp_min(torch.finfo(torch.float32).tiny) / 448)[..., None]
    _, exponent = torch.frexp(scaled)
    step = torch.ldexp((scaled != 0).float(), exponent.clamp_min(-5) - 1 - MANTISSA_BITS["fp8"])
    return (step * (amax / 448)[..., None]).square().mean() / 12

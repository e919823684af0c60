"""Statistics of real batches that the variance indicator needs, gathered in one forward and backward pass.

Everything stays on the device as small tensors until the pass is over: no copy to the host per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.lowering.lowered_graph import Cast, Run
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.precision import (
    MANTISSA_BITS,
    PRECISIONS_BY_KIND,
    ROUNDS_WHAT_IT_READS,
    Precision,
    rounded_type,
)


@dataclass(frozen=True, slots=True)
class OpStatistics:
    """What one batch showed of one operator: squared Frobenius norms, and per-element rounding variances by
    type.

    Lists run over what is rounded: Op.inputs, but of an embedding its result (the rows that it looked up).
    `rounding` of a type is the mean over elements of the variance that rounding to it adds.
    """

    shapes: list[tuple[int, ...]]
    squares: list[float]
    rounding: list[dict[str, float]]
    output_square: float
    gradient_square: float
    gradient_rounding: dict[str, float]
    weight_trains: bool


@dataclass(slots=True)
class _Raw:
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
        self._raw: dict[str, _Raw] = {}
        self._operands: dict[str, tuple[Any, ...]] = {}
        self._pending: list[tuple[str, torch.Tensor, tuple[Any, ...]]] = []

    def began(self) -> None:
        """Nothing to do: statistics have no order."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Keep what an operator read and wrote until `describe` says which operators they were."""
        if isinstance(node, Run) and node.mode in ("fp32",) and isinstance(result, torch.Tensor):
            self._pending.append((node.op, result, operands))

    def describe(self, graph: OpGraph) -> None:
        """Take the statistics of every adjustable operator that ran, and ask for those of its gradient."""
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

    def _take(self, op: Op, result: torch.Tensor, operands: tuple[Any, ...]) -> _Raw:
        usable = [p for p in self._precisions if p in PRECISIONS_BY_KIND[op.kind]]
        weight = operands[2 if op.kind == "addmm" else 1] if len(operands) > 1 else None
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
        return _Raw(
            [tuple(t.shape) for t in rounded], squares, rounding, result.float().square().sum(), trains
        )

    def _take_gradient(self, name: str, gradient: torch.Tensor) -> None:
        raw = self._raw[name]
        with torch.no_grad():
            raw.gradient_square = gradient.float().square().sum()
            types = {"bf16", *("fp16" for p in self._precisions if p is Precision.FP16)}
            types |= {"tf32" for p in self._precisions if p is Precision.TF32}
            types |= {"int8_stochastic" for p in self._precisions if p is Precision.INT8_ALL}
            types |= {"e5m2" for p in self._precisions if p is Precision.FP8}
            raw.gradient_rounding = {t: rounding_variance(gradient, t) for t in types}

    def check_finite(self, graph: OpGraph) -> None:
        """CalibrationError naming the first operator, in model order, that met NaN or Inf."""
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
        """The statistics of every adjustable operator that ran, as numbers."""
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
    """Rounding variances of a gradient that never came: all zero."""

    def __missing__(self, key: str) -> float:
        return 0.0


def rounding_variance(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Mean over elements of the variance that rounding to a type adds.

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

"""What first-order indicators look at: each operand of each operator, with its gradient, in one FP32 step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.rounding import rounded_to
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.records.profiles import Sensitivity

# What comes after these operands is a mask, which asks for attention's slow path when it takes a gradient.
MOST_OPERANDS = 3


@dataclass(slots=True)
class Edge:
    """One operand on its way into one operator, and dL/doperand as this operator alone sends it back."""

    op: str
    index: int
    value: torch.Tensor
    is_parameter: bool
    gradient: Any = None  # a tensor once backward has been there


class Edges:
    """An Observer (see qsync.runtime.rewriting): `of_step` takes a step and returns its edges, in order."""

    def __init__(self) -> None:
        self._found: list[Edge] = []
        self._open = False

    def of_step(self, calibration: Calibration, batch: int) -> list[Edge]:
        """One FP32 step on one batch, to which this observer must be assigned."""
        self._found, self._open = [], True
        loss = calibration.forward(batch)
        self._open = False  # what a checkpoint computes again in backward is not looked at
        calibration.backward(loss, batch)
        return [edge for edge in self._found if edge.gradient is not None]

    def began(self) -> None:
        """Nothing to do: edges are listed over the whole step."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Nothing to do: results are not looked at."""

    def taken(self, op: str, index: int, operand: Any) -> Any:
        """Give an operand an edge of its own."""
        if not self._open or index >= MOST_OPERANDS or not is_felt(operand):
            return operand
        tensor = own_edge(operand)
        # Copied where a later step writes to it: parameters.
        is_parameter = isinstance(operand, torch.nn.Parameter)
        edge = Edge(op, index, tensor.detach().clone() if is_parameter else tensor.detach(), is_parameter)
        on_gradient(tensor, lambda gradient: setattr(edge, "gradient", gradient.detach()))
        self._found.append(edge)
        return tensor


def rounded(calibration: Calibration, edge: Edge) -> Iterator[tuple[Precision, str]]:
    """The precisions that round this operand, with the type that each rounds it to."""
    kind = next(op.kind for op in calibration.runner.graph.adjustable if op.name == edge.op)
    for precision in calibration.precisions:
        if precision is not Precision.FP32 and precision in PRECISIONS_BY_KIND[kind]:
            type_name = rounded_to(kind, edge.index, precision)
            if type_name != "fp32":
                yield precision, type_name


class Scores:
    """Sums of scores by operator and precision, on the device until all are there."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Precision], torch.Tensor] = {}

    def add(self, op: str, precision: Precision, score: torch.Tensor) -> None:
        """Add to what the operator scores at this precision."""
        self._sums[op, precision] = self._sums.get((op, precision), torch.zeros_like(score)) + score

    def sensitivity(self, calibration: Calibration, indicator: str) -> Sensitivity:
        """The mean over batches of every sum, its magnitude, brought to the host at once; what was never
        added to is zero.
        """
        graph, num = calibration.runner.graph, len(calibration.losses)
        omega = calibration.empty(graph)
        found = torch.stack([*self._sums.values()]).div(num).abs().tolist() if self._sums else []
        for (op, precision), score in zip(self._sums, found, strict=True):
            if not math.isfinite(score):
                raise CalibrationError(
                    f"the {indicator} score of {op} at {precision} is {score}; clean the batch or the weights"
                )
            omega[op][str(precision)] = score
        return Sensitivity(graph.hash, indicator, omega, num)


def own_edge(operand: torch.Tensor) -> torch.Tensor:
    """The same values under a name of their own, whose gradient is what one operator alone sends back."""
    return operand.view_as(operand) if operand.requires_grad else operand.detach().requires_grad_()


def on_gradient(tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
    """Call `receive` with the gradient of this tensor once it is complete."""
    tensor.register_hook(receive)  # type: ignore[no-untyped-call]


def is_felt(value: Any) -> bool:
    """Whether a value is one that precisions round and gradients flow to."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32 and torch.is_grad_enabled()

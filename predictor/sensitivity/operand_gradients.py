"""Every operand of every operator with its gradient, from one FP32 step: for first-order indicators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.sensitivity.calibration import Calibration, below_fp32
from qsync.predictor.sensitivity.rounding import rounded_to
from qsync.records.precision import Precision
from qsync.records.profiles import Sensitivity


@dataclass(slots=True)
class Edge:
    """One operand of one operator, and the gradient dL/doperand of this operator alone."""

    op: str
    index: int
    value: torch.Tensor
    is_parameter: bool
    gradient: Any = None  # a tensor after backward


class Edges:
    """An Observer (see qsync.runtime.rewriting) of the operands ("edges") of one step at a time."""

    def __init__(self) -> None:
        self._found: list[Edge] = []
        self._open = False

    def of_step(self, calibration: Calibration, batch: int) -> list[Edge]:
        """Take one FP32 step on one batch, with this observer assigned, and return its edges in order."""
        self._found, self._open = [], True
        loss = calibration.forward(batch)
        self._open = False  # recomputation in backward (checkpoints) is not observed
        calibration.backward(loss, batch)
        return [edge for edge in self._found if edge.gradient is not None]

    def began(self) -> None:
        """Do nothing: edges are listed over the whole step."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Do nothing: only operands are observed."""

    def taken(self, op: str, index: int, operand: Any) -> Any:
        """Return a view of the operand with a gradient of its own."""
        if not takes_gradient(operand):
            return operand
        tensor = own_view(operand)  # also where a checkpoint recomputes: it must save what forward saved
        if not self._open:
            return tensor
        # Parameters are copied: a later step may write to them.
        is_parameter = isinstance(operand, torch.nn.Parameter)
        edge = Edge(op, index, tensor.detach().clone() if is_parameter else tensor.detach(), is_parameter)
        on_gradient(tensor, lambda gradient: setattr(edge, "gradient", gradient.detach()))
        self._found.append(edge)
        return tensor


def rounded(calibration: Calibration, edge: Edge) -> Iterator[tuple[Precision, str]]:
    """Yield the precisions that round this operand, each with the type it rounds to."""
    kind = next(op.kind for op in calibration.runner.graph.adjustable if op.name == edge.op)
    for precision in below_fp32(kind, calibration.precisions):
        type_name = rounded_to(kind, edge.index, precision)
        if type_name != "fp32":
            yield precision, type_name


class Scores:
    """Sums of scores by operator and precision, on the device until all are complete."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Precision], torch.Tensor] = {}

    def add(self, op: str, precision: Precision, score: torch.Tensor) -> None:
        """Add to the score of an operator at a precision."""
        self._sums[op, precision] = self._sums.get((op, precision), torch.zeros_like(score)) + score

    def sensitivity(self, calibration: Calibration, indicator: str) -> Sensitivity:
        """Return the magnitude of every sum's mean over batches, in one copy to the host.

        An operator without any score gets zero.
        """
        graph, num = calibration.runner.graph, len(calibration.losses)
        omega = calibration.zeros(graph)
        found = torch.stack([*self._sums.values()]).div(num).abs().tolist() if self._sums else []
        for (op, precision), score in zip(self._sums, found, strict=True):
            if not math.isfinite(score):
                raise CalibrationError(
                    f"the {indicator} score of {op} at {precision} is {score}; clean the batch or the weights"
                )
            omega[op][str(precision)] = score
        return Sensitivity(graph.hash, indicator, omega, num)


def own_view(operand: torch.Tensor) -> torch.Tensor:
    """Return a view whose gradient is that of its one reader alone."""
    return operand.view_as(operand) if operand.requires_grad else operand.detach().requires_grad_()


def on_gradient(tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
    """Call `receive` with the gradient of this tensor once it is complete."""
    tensor.register_hook(receive)  # type: ignore[no-untyped-call]


def takes_gradient(value: Any) -> bool:
    """Return whether a value is an FP32 tensor, which precisions round, that may get a gradient."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32 and torch.is_grad_enabled()

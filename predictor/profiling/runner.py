"""The interface of models that profiles and indicators run under assignments, and loss checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from qsync.backend.selection.kernel_selection import Kernels
from qsync.errors import CalibrationError, shortened
from qsync.lowering.lowered_graph import LoweredGraph
from qsync.operators.precision import Precision
from qsync.records.graph import OpGraph

Choose = Callable[[OpGraph], Mapping[str, Precision]]


class Runner(Protocol):
    """A model that runs under the assignment chosen last (qsync.runtime.program.Program)."""

    kernels: Kernels

    @property
    def model(self) -> torch.nn.Module:
        """Return the model."""
        ...

    def choose(
        self, choose: Choose, observer: Any = None, saving_less: Callable[[OpGraph], Any] | None = None
    ) -> None:
        """Choose the assignment of the next steps, and the observer that sees every node."""

    def unsupported(self, graph: OpGraph, precision: Precision) -> Mapping[str, str]:
        """Return the operators without a kernel in this precision, each with the reason."""
        ...

    @property
    def graph(self) -> OpGraph:
        """Return the traced graph, which is known after the first step."""
        ...

    @property
    def lowered(self) -> tuple[LoweredGraph, ...]:
        """Return the lowered graphs that ran."""
        ...


def check_scalar(loss: torch.Tensor) -> None:
    """Raise CalibrationError unless the loss is a single number with a gradient.

    The check reads only the shape, so it does not wait for the device.
    """
    if not isinstance(loss, torch.Tensor):
        raise CalibrationError(
            f"the loss is a {type(loss).__name__}, {shortened(loss)}; return the loss alone, as a tensor of "
            "one number"
        )
    if loss.numel() != 1:
        raise CalibrationError(
            f"the loss has shape {tuple(loss.shape)}; return one number, for example its mean"
        )
    if not loss.requires_grad:
        raise CalibrationError(
            "the loss has no gradient: it was detached, or computed under torch.no_grad; return it as the "
            "training step that calls backward has it"
        )


def check_finite(loss: torch.Tensor) -> None:
    """Raise CalibrationError unless the loss is finite."""
    if not math.isfinite(loss.item()):
        raise CalibrationError(
            f"the loss on the example batch is {loss.item()}; check the batch for NaN and Inf"
        )

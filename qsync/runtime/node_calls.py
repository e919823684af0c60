"""Calls of a rewritten graph's nodes besides torch functions: casts, kernels, reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from qsync.backend.casts.epilogues import Activation
from qsync.backend.encoding import Operand
from qsync.backend.kernels.linear import DTYPES
from qsync.errors import MiscomputedError, UnsupportedError
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision
from qsync.runtime.coverage import say_once
from qsync.runtime.weight_cache import CastFunction


class KernelTable(Protocol):
    """The interface of a backend for the FX pass: see qsync.backend.select and OpaqueKernels."""

    replaced_in_fp32: tuple[str, ...]  # kinds of products that `kernel` computes instead of the traced call

    @property
    def sixteen_bit(self) -> str | None:
        """Return the device's 16-bit float between operators."""

    def cast(self, tensor: torch.Tensor, target: str) -> Any:
        """Return a tensor converted to another type."""

    def kernel(self, kind: str, precision: Precision) -> Callable[..., torch.Tensor]:
        """Return the kernel of a kind of operator in a precision."""

    @property
    def keeps_copies(self) -> bool:
        """Return whether a weight's cast may serve several calls."""

    @property
    def plain_casts(self) -> tuple[str, ...]:
        """Return the types for which a cast is torch's own conversion."""

    def saving(self, kind: str, form: str) -> Callable[..., torch.Tensor]:
        """Return the operator of a kind that saves its tensors in a form."""

    @property
    def replaced_in_bf16(self) -> tuple[str, ...]:
        """Return the kinds of products with a faster kernel in BF16 than the traced call."""

    def in_lowered_graphs(self, kind: str) -> Callable[..., torch.Tensor]:
        """Return the replacement of a kind in `REPLACED` or `replaced_in_bf16`."""


class Observer(Protocol):
    """An observer of a run, called at each node of the lowered graph with result and operands.

    A method `taken(op, index, operand)` is called for each operand of an adjustable operator in FP32; the
    operator uses its return value. An observer with `only_times` gets no operands, and in-place writes stay
    in place.
    """

    def began(self) -> None:
        """Handle the start of a traced graph."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Handle a finished node."""


class CastCall(torch.nn.Module):
    """Casts an activation: the call of one Cast node."""

    def __init__(self, cast: CastFunction, target: str) -> None:
        super().__init__()
        self._cast, self._target = cast, target

    def forward(self, value: Any) -> Any:
        """Return the value in the target type."""
        if isinstance(value, (tuple, list)):  # results of split and chunk
            return type(value)(self.forward(item) for item in value)
        return self._cast(value, self._target)


class KernelCall(torch.nn.Module):
    """Runs a kernel for one Run node; encoded operands come as (value, encoded) pairs.

    The kernel computes an `activation` in its epilogue. An unsupported call runs in torch's next higher
    precision, with a warning.
    """

    def __init__(
        self,
        kernels: KernelTable,
        kind: str,
        run: Run,
        target: Callable[..., Any],
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self._kernel, self._traced, self._run = kernels.kernel(kind, Precision(run.mode)), target, run
        self._output, self._activation = run.output, activation
        self._fused = {} if activation is None else {"activation": activation}
        low = run.mode not in (Precision.FP32, Precision.TF32, Precision.BF16)
        self._up = (kernels.sixteen_bit if low else None) or "fp32"

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the kernel."""
        try:
            return self._kernel(self._traced, self._output, *args, **self._fused, **kwargs)
        except UnsupportedError as error:
            return self._one_up(error, args, kwargs)

    def _one_up(self, error: UnsupportedError, args: Any, kwargs: Any) -> torch.Tensor:
        up = "fp32" if isinstance(error, MiscomputedError) else self._up
        say_once(f"{self._run.op} in {self._run.mode}: {error}; such calls run in {up}", False)
        dtype = DTYPES[up]

        def plain(value: Any) -> Any:
            value = value.value if isinstance(value, Operand) else value
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        result = self._traced(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        result = result if self._activation is None else self._activation(result)
        return result.to(DTYPES[self._output])


class FollowingCall(torch.nn.Module):
    """Runs a following operator by qsync's own kernel, which saves less or is faster."""

    def __init__(self, run: Callable[..., torch.Tensor], target: Callable[..., Any]) -> None:
        super().__init__()
        self._run, self._traced = run, target

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the operator."""
        return self._run(self._traced, *args, **kwargs)


class Report(torch.nn.Module):
    """Reports a finished node to the observer."""

    def __init__(self, observer: Observer, node: Cast | Run) -> None:
        super().__init__()
        self._observer, self._node = observer, node

    def forward(self, result: Any, *operands: Any) -> Any:
        """Report the result to the observer, and return it."""
        self._observer.seen(self._node, result, operands)
        return result


class Taken(torch.nn.Module):
    """Shows the observer an operand before an operator uses it."""

    def __init__(self, observer: Any, op: str, index: int) -> None:
        super().__init__()
        self._observer, self._op, self._index = observer, op, index

    def forward(self, operand: Any) -> Any:
        """Return the observer's replacement of an operand."""
        return self._observer.taken(self._op, self._index, operand)

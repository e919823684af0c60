"""What the nodes of a rewritten graph call, besides torch's own functions: casts, kernels, reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from qsync.backend.casts.epilogues import Activation
from qsync.backend.encoding import Operand
from qsync.backend.kernels.linear import DTYPES
from qsync.errors import MiscomputedError, UnsupportedError
from qsync.lowering.lowered_graph import Cast, Run
from qsync.records.precision import Precision
from qsync.runtime.coverage import say_once
from qsync.runtime.weight_cache import CastFunction


class KernelTable(Protocol):
    """What the pass needs of a backend: see qsync.backend.select, and OpaqueKernels for exported graphs."""

    replaced_in_fp32: tuple[str, ...]  # kinds of products that `kernel` computes in the traced call's place

    @property
    def sixteen_bit(self) -> str | None:
        """The 16-bit float that the device carries along edges."""

    def cast(self, tensor: torch.Tensor, target: str) -> Any:
        """Return a tensor in another type."""

    def kernel(self, kind: str, precision: Precision) -> Callable[..., torch.Tensor]:
        """Return the kernel of a kind of operator in a precision."""

    @property
    def keeps_copies(self) -> bool:
        """Return whether a copy of a weight may serve several calls."""

    @property
    def plain_casts(self) -> tuple[str, ...]:
        """Return the types to which a cast is torch's own conversion."""

    def saving(self, kind: str, form: str) -> Callable[..., torch.Tensor]:
        """Return the operator of a kind that saves in a form."""

    @property
    def replaced_in_bf16(self) -> tuple[str, ...]:
        """Return the kinds of products whose traced call in BF16 has a faster one here."""

    def in_lowered_graphs(self, kind: str) -> Callable[..., torch.Tensor]:
        """Return the operator of a kind in `REPLACED` or `replaced_in_bf16`."""


class Observer(Protocol):
    """An observer of a run: it sees each node of the lowered graph with its result and its operands.

    An observer with a method `taken(op, index, operand)` also sees each operand of an adjustable operator
    that is about to run in FP32. The operator gets the value that the method returns. An observer with
    `only_times` keeps no tensors: it is shown no operands, and what would be written over still is.
    """

    def began(self) -> None:
        """Note that a traced graph is about to run."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Note that a node has run."""


class CastCall(torch.nn.Module):
    """One Cast node of an activation."""

    def __init__(self, cast: CastFunction, target: str) -> None:
        super().__init__()
        self._cast, self._target = cast, target

    def forward(self, value: Any) -> Any:
        """Return the value in the target type."""
        if isinstance(value, (tuple, list)):  # what split and chunk return
            return type(value)(self.forward(item) for item in value)
        return self._cast(value, self._target)


class KernelCall(torch.nn.Module):
    """One Run node whose precision needs a kernel. Operands to be encoded come as (value, encoded) pairs.

    With an `activation` the kernel computes it in its epilogue. A call that the kernel does not support runs
    in the next precision up that torch has, with a warning.
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
    """One Run node of a following operator that is not torch's own: it saves less, or is faster."""

    def __init__(self, run: Callable[..., torch.Tensor], target: Callable[..., Any]) -> None:
        super().__init__()
        self._run, self._traced = run, target

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the operator."""
        return self._run(self._traced, *args, **kwargs)


class Report(torch.nn.Module):
    """A call that shows the observer a node that has run."""

    def __init__(self, observer: Observer, node: Cast | Run) -> None:
        super().__init__()
        self._observer, self._node = observer, node

    def forward(self, result: Any, *operands: Any) -> Any:
        """Return the result once the observer has seen it."""
        self._observer.seen(self._node, result, operands)
        return result


class Taken(torch.nn.Module):
    """A call that shows the observer an operand on its way into one operator."""

    def __init__(self, observer: Any, op: str, index: int) -> None:
        super().__init__()
        self._observer, self._op, self._index = observer, op, index

    def forward(self, operand: Any) -> Any:
        """Return the operand that the observer gives for this one."""
        return self._observer.taken(self._op, self._index, operand)

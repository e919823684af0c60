"""Cast weights once per optimizer step: micro-batches that accumulate gradients share one copy.

A copy serves while the weight is the very tensor it was made from: same storage, same autograd version, no
optimizer has stepped since, and a gradient is being accumulated. A step by hand, `p.data -= lr * p.grad`,
leaves no mark but the numbers: at every call samples of all weights are compared with those that were cast.
A copy serves training only: evaluation may swap weights, so every call of a model in evaluation, or without
gradients, casts anew.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsync.backend.kernels.convolution import weight_gradient
from qsync.records.precision import is_encoded
from qsync.tracing.replaced_forward import untraced

_SAMPLED = 16  # elements of a weight that are compared


class Caster(Protocol):
    """What makes the copy: see qsync.backend.select."""

    def cast_weight(self, weight: torch.Tensor, target: str) -> Any:
        """Return the weight in another type; it may pass gradients on, and need not."""


class WeightCast(torch.nn.Module):
    """One Cast node of a parameter."""

    def __init__(self, kernels: Caster, target: str) -> None:
        super().__init__()
        self._kernels, self._target = kernels, target
        self._key: tuple[int, int, int] | None = None
        self._copy: Any = None
        self.sampled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        _steps.casts.add(self)

    def forget(self) -> None:
        """Free the copy: it does not last from one step to the next."""
        self._key = self._copy = self.sampled = None

    def forward(self, weight: torch.Tensor) -> Any:
        """Return the weight in the target type: the copy of this step, or a new one."""
        if not torch.is_grad_enabled():
            return self._kernels.cast_weight(weight, self._target)
        key = (weight.data_ptr(), weight._version, _steps.count)
        # Without a gradient this is the first micro-batch. Inside backward it is activation recomputation
        # that runs forward again.
        first = weight.requires_grad and weight.grad is None and torch._C._current_graph_task_id() == -1
        if key != self._key or first:
            self.forget()
            with torch.set_grad_enabled(not is_encoded(self._target)):
                made = self._kernels.cast_weight(weight, self._target)
            self._copy = made.detach() if isinstance(made, torch.Tensor) else made
            self._key, self.sampled = key, (weakref.ref(weight), _sample(weight).clone())
            if isinstance(made, torch.Tensor) and made.requires_grad:
                return made
        if isinstance(self._copy, torch.Tensor):
            return _Copied.apply(weight, self._copy)  # type: ignore[no-untyped-call]
        return self._copy


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of a few elements, spread over the weight's memory."""
    step = max(1, weight.numel() // _SAMPLED)
    return weight.detach().as_strided((weight.numel() // step,), (step,))


class _Copied(torch.autograd.Function):
    """A copy of a weight in another type; its gradient goes to the weight, in the weight's type."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Return the copy; `weight` is there for autograd alone."""
        ctx.dtype, ctx.contiguous = weight.dtype, weight.is_contiguous()
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient in the type and order of the weight."""
        if gradient.ndim == 4:
            return weight_gradient(gradient, ctx.dtype, ctx.contiguous), None
        return gradient.to(ctx.dtype), None


@untraced("it compares weights")
def check_copies() -> None:
    """Free every copy if a weight was written to by hand; one comparison for all weights of a type."""
    samples: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for cast in _steps.casts:
        weight = cast.sampled[0]() if cast.sampled is not None else None
        if cast.sampled is None or weight is None:
            continue
        before = cast.sampled[1]
        moved = (before.device, before.dtype) != (weight.device, weight.dtype)
        if moved or weight.untyped_storage().nbytes() < weight.nbytes:  # FSDP frees it between calls
            cast.forget()
        else:
            samples.setdefault((before.device, before.dtype), []).append((before, _sample(weight)))
    for pairs in samples.values():
        before, now = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if not torch.equal(before, now):
            forget_copies()
            return


def forget_copies() -> None:
    """Make every weight be cast anew at its next use."""
    _steps.stepped()


class _Steps:
    """A count of the optimizer steps of the process: one that writes through `.data` leaves no version."""

    def __init__(self) -> None:
        self.count = 0
        self.casts: weakref.WeakSet[WeightCast] = weakref.WeakSet()
        register_optimizer_step_post_hook(self.stepped)

    def stepped(self, *_: Any) -> None:
        """Count a step and free every copy."""
        self.count += 1
        for cast in self.casts:
            cast.forget()


_steps = _Steps()

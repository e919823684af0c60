"""Cast weights once per optimizer step on CPUs, shared by accumulating micro-batches.

A copy is valid while the weight has the same storage and autograd version, no optimizer has stepped, and
gradients accumulate. A manual step, `p.data -= lr * p.grad`, changes only the values, so every call compares
samples of all weights with those at casting. Copies are used only in training: calls in evaluation or without
gradients cast again, since evaluation may swap weights. So do weights made in inference mode, which have no
autograd version.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsync.operators.precision import is_encoded
from qsync.tracing.replaced_forward import untraced

_SAMPLED = 16  # compared elements of a weight


# (tensor, type name) -> the tensor in that type.
CastFunction = Callable[[torch.Tensor, str], Any]


class WeightCast(torch.nn.Module):
    """Casts a parameter: the call of one Cast node."""

    def __init__(self, cast: CastFunction, target: str) -> None:
        super().__init__()
        self.copy = WeightCopy(cast, target)

    def forward(self, weight: torch.Tensor) -> Any:
        """Return the weight in the target type."""
        return self.copy(weight)


class WeightCopy:
    """A cached copy of a weight in another type; not a module, whose attributes are slow to set."""

    def __init__(self, cast: CastFunction, target: str) -> None:
        self._cast, self._target, self._encoded = cast, target, is_encoded(target)
        self._key: tuple[int, int, int] | None = None
        self._copy: Any = None
        self.sample: torch.Tensor | None = None  # view of a few elements of the weight's memory
        self.before: torch.Tensor | None = None  # their values when the copy was made
        self._sampled_at = 0
        _steps.casts.add(self)

    def forget(self) -> None:
        """Free the copy at the end of a step."""
        self._key = self._copy = self.before = None

    def __call__(self, weight: torch.Tensor) -> Any:
        """Return the weight in the target type: this step's copy, or a new one."""
        if not torch.is_grad_enabled() or weight.is_inference():
            return self._cast(weight, self._target)
        # Without a gradient this is the first micro-batch. Inside backward it is activation recomputation.
        first = weight.requires_grad and weight.grad is None and torch._C._current_graph_task_id() == -1
        if first or self._key != (weight.data_ptr(), weight._version, _steps.count):
            return self._made_anew(weight)
        if isinstance(self._copy, torch.Tensor):
            return _Copied.apply(weight, self._copy)  # type: ignore[no-untyped-call]
        return self._copy

    def _made_anew(self, weight: torch.Tensor) -> Any:
        self.forget()  # before the new copy is made, so that only one exists
        if self._encoded:
            with torch.no_grad():
                made = self._copy = self._cast(weight, self._target)
        else:
            made = self._cast(weight, self._target)
            self._copy = made.detach()
        if not is_functorch_wrapped_tensor(weight):  # a functorch wrapper is gone after this call
            pointer = weight.data_ptr()
            if pointer != self._sampled_at:
                self.sample, self._sampled_at = _sample(weight), pointer
            self._key = (pointer, weight._version, _steps.count)
            _steps.fresh.append(self)
        return made


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of a few elements of a weight, spread over rows and columns.

    An input feature that is always 0 (a border pixel) leaves a whole column unchanged.
    """
    step = max(1, weight.numel() // _SAMPLED)
    row = weight.numel() // max(1, weight.shape[0]) if weight.dim() else 1
    while math.gcd(step, row) > 1:
        step -= 1
    return weight.detach().as_strided((weight.numel() // step,), (step,))


class _Copied(torch.autograd.Function):
    """Copies a weight to another type; the gradient returns in the weight's type."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Return the copy; `weight` is passed only for autograd."""
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient in the type of the weight."""
        return gradient.to(ctx.dtype), None


def copies_of(module: torch.nn.Module) -> list[WeightCopy]:
    """Return the weight copies of a rewritten graph."""
    return [call.copy for call in module.modules() if isinstance(call, WeightCast)]


@untraced("it compares weights")
def check_copies(copies: Iterable[WeightCopy]) -> None:
    """Free all copies if a weight was changed manually since `note_copies`."""
    for casts in _by_type(cast for cast in copies if cast.before is not None):
        before = torch.cat([cast.before for cast in casts if cast.before is not None])
        if not torch.equal(before, _samples(casts)):
            forget_copies()
            return


@untraced("it compares weights")
def note_copies() -> None:
    """Store a sample of every weight cast in this call."""
    for casts in _by_type(_steps.fresh):
        sizes = [len(cast.sample) for cast in casts if cast.sample is not None]
        samples = torch.split(_samples(casts), sizes)
        for cast, sample in zip(casts, samples, strict=True):
            cast.before = sample
    _steps.fresh.clear()


def _by_type(casts: Iterable[WeightCopy]) -> list[list[WeightCopy]]:
    """Group casts by their weights' device and type.

    Copies of weights with freed memory are freed, too (FSDP frees weights between calls).
    """
    found: dict[tuple[torch.device, torch.dtype], list[WeightCopy]] = {}
    for cast in casts:
        if cast.sample is None or not cast.sample.untyped_storage().nbytes():
            cast.forget()
        else:
            found.setdefault((cast.sample.device, cast.sample.dtype), []).append(cast)
    return list(found.values())


def _samples(casts: list[WeightCopy]) -> torch.Tensor:
    return torch.cat([cast.sample for cast in casts if cast.sample is not None])


def forget_copies() -> None:
    """Free all copies, so that every weight is cast again."""
    _steps.stepped()


class _Steps:
    """Counts the process's optimizer steps: writes through `.data` do not change versions."""

    def __init__(self) -> None:
        self.count = 0
        self.casts: weakref.WeakSet[WeightCopy] = weakref.WeakSet()
        self.fresh: list[WeightCopy] = []  # made in this call
        register_optimizer_step_post_hook(self.stepped)

    def stepped(self, *_: Any) -> None:
        """Count an optimizer step and free every copy."""
        self.count += 1
        self.fresh.clear()
        for cast in self.casts:
            cast.forget()


_steps = _Steps()

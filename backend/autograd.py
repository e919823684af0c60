"""Call differentiable functions with types."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._compile import _disable_dynamo
from torch.autograd import Function

from qsync.errors import UnsupportedError

# Whether the graph that is recorded goes backward many times, each time on other saved tensors.
is_replayed = ContextVar("is_replayed", default=False)
# Keeps a backward out of what torch.compile traces: a model may ask for gradients in its forward.
untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = _disable_dynamo


def differentiable(function: type[Function], *arguments: Any) -> Tensor:
    """Return `function.apply(*arguments)`, which torch leaves untyped."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of a kernel refuse what it cannot do, before anything is computed.

    torch's decorator of this name lets `create_graph=True` through if the gradient that arrives is a constant
    (that of a sum), and returns a gradient that does not depend on the weights: a penalty on it would train
    nothing, in silence. A model may ask for gradients in its forward (forces): what runs then is no part of
    it, so torch.compile is not to trace it.

    >>> @staticmethod
    ... @once_differentiable
    ... def backward(ctx, gradient): ...
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise no_second_derivative()
        if any(gradient is not None and _is_many(gradient) for gradient in gradients):
            raise UnsupportedError(
                "qsync's kernels take one gradient at a time, not many in torch.vmap: leave is_grads_batched "
                "or vectorize out, or keep these products in fp32"
            )
        return backward(ctx, *gradients)

    return untraced(checked)


def is_recorded(gradient: Tensor) -> bool:
    """Return whether a backward is to be differentiated itself, or computes many gradients in torch.vmap.

    Torch's own operators can do both.
    """
    return torch.is_grad_enabled() or _is_many(gradient)


def _is_many(gradient: Tensor) -> bool:
    return is_functorch_wrapped_tensor(gradient) or is_legacy_batchedtensor(gradient)


def no_second_derivative() -> UnsupportedError:
    """Return the error of a backward that is to be differentiated itself."""
    return UnsupportedError(
        "qsync's kernels cannot be differentiated twice: leave create_graph=True out, or keep the products "
        'under it in fp32 (a pin in the plan, or precisions=["fp32"] where it is made)'
    )


def owned(result: Tensor) -> Tensor:
    """Return a result of a function's forward as a tensor of its own, if it is a view of what forward made.

    torch refuses to change a view that was made inside a function, as `logits[mask] = 0` would. Where forward
    saves its result for backward, it must save the tensor that this returns, so that torch notices a change.

    >>> return owned(y.view(shape))
    """
    if not result._is_view():
        return result
    place = (result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
    return result.new_empty(0).set_(*place)

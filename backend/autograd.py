"""Give torch's untyped calls of autograd functions types, and refuse second derivatives."""

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

# True while a recorded graph runs backward repeatedly, each time on other saved tensors.
is_replayed = ContextVar("is_replayed", default=False)
# Keeps torch.compile from tracing a backward: a model may ask for gradients in its forward.
untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = _disable_dynamo


def differentiable(function: type[Function], *arguments: Any) -> Tensor:
    """Return `function.apply(*arguments)` with its type, which torch leaves out."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel's backward refuse second derivatives and batched gradients.

    torch's decorator of this name lets `create_graph=True` through if the incoming gradient is a constant
    (that of a sum). It then returns a gradient that does not depend on the weights, and a penalty on it
    trains nothing, in silence. torch.compile does not trace such a backward: a model may ask for gradients
    (forces) in its forward.

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
                "qsync's kernels take one gradient at a time, not many in torch.vmap: leave out "
                "is_grads_batched or vectorize, or keep these products in fp32"
            )
        return backward(ctx, *gradients)

    return untraced(checked)


def is_recorded(gradient: Tensor) -> bool:
    """Return whether autograd records this backward, or torch.vmap batches its gradients."""
    return torch.is_grad_enabled() or _is_many(gradient)


def _is_many(gradient: Tensor) -> bool:
    return is_functorch_wrapped_tensor(gradient) or is_legacy_batchedtensor(gradient)


def no_second_derivative() -> UnsupportedError:
    """Return the error for a backward that is to be differentiated a second time."""
    return UnsupportedError(
        "qsync's kernels cannot be differentiated twice: leave out create_graph=True, or keep the products "
        'under it in fp32 (a pin in the plan, or precisions=["fp32"] where it is made)'
    )


def owned(result: Tensor) -> Tensor:
    """Return a forward's result as a tensor that the user may change in place.

    torch refuses to change a view made inside an autograd function (`logits[mask] = 0`). If forward saves its
    result for backward, it must save the returned tensor, so that torch notices a change.

    >>> return owned(y.view(shape))
    """
    if not result._is_view():
        return result
    place = (result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
    return result.new_empty(0).set_(*place)

"""Call differentiable functions with types."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd import Function

# Whether the graph that is recorded goes backward many times, each time on other saved tensors.
is_replayed = ContextVar("is_replayed", default=False)


def differentiable(function: type[Function], *arguments: Any) -> Tensor:
    """Return `function.apply(*arguments)`, which torch leaves untyped."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


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

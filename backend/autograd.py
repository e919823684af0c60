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

"""Call differentiable functions with types."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def differentiable(function: type[Function], *arguments: Any) -> Tensor:
    """Return `function.apply(*arguments)`, which torch leaves untyped."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result

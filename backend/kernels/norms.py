"""Norms on GPUs of 16-bit values: torch wants the parameters in the type of what they scale.

On CPUs torch takes FP32 parameters beside a 16-bit input. On GPUs layer_norm and group_norm refuse them, and
rms_norm falls back to its slow form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Kinds that have this rule; batch_norm takes FP32 parameters and statistics on every device.
NORMS_OF_ONE_TYPE = ("layer_norm", "group_norm", "rms_norm")


def norm(target: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a norm; on a GPU its parameters are rounded to the type of `input` first, differentiably.

    `target` is F.layer_norm, F.group_norm, F.rms_norm or torch's function of the same name.

    >>> norm(F.layer_norm, x.bfloat16(), (768,), weight, bias)
    """
    named = {name: in_type_of(value, input) for name, value in kwargs.items()}
    return target(input, *(in_type_of(value, input) for value in args), **named)


def in_type_of(value: Any, input: Tensor) -> Any:
    """Return a floating-point tensor on a GPU in the type of `input`; anything else as it is.

    >>> in_type_of(weight, x)
    """
    is_other = isinstance(value, Tensor) and value.is_cuda and value.is_floating_point()
    return value.to(input.dtype) if is_other else value

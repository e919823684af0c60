"""Norms of 16-bit values where torch wants the parameters in the type of what they scale: on GPUs above all.

On CPUs torch takes FP32 parameters beside a 16-bit input, but layer_norm's backward refuses a bias alone,
without a weight: it gets a weight of ones. On GPUs layer_norm and group_norm refuse them, and rms_norm falls
back to its slow form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Kinds that have this rule; batch_norm takes FP32 parameters and statistics on every device.
NORMS_OF_ONE_TYPE = ("layer_norm", "group_norm", "rms_norm")
_LAYER_NORMS = (torch.nn.functional.layer_norm, torch.layer_norm)
_ARGUMENTS = ("normalized_shape", "weight", "bias", "eps", "cudnn_enable")  # of layer_norm, after the input


def norm(target: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a norm; on a GPU its parameters are rounded to the type of `input` first, differentiably.

    A layer_norm with a bias of another type alone gets a weight of ones. `target` is F.layer_norm,
    F.group_norm, F.rms_norm or torch's function of the same name.

    >>> norm(F.layer_norm, x.bfloat16(), (768,), weight, bias)
    """
    placed = [in_type_of(value, input) for value in args]
    named = {name: in_type_of(value, input) for name, value in kwargs.items()}
    if target in _LAYER_NORMS:
        named |= dict(zip(_ARGUMENTS, placed, strict=False))
        placed, named["weight"] = [], weight_beside(named.get("bias"), named.get("weight"), input)
    return target(input, *placed, **named)


def has_bias_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of layer_norm, or its traced node, has a bias and no weight.

    >>> has_bias_alone((x, (768,), None, bias), {})
    """
    given = dict(zip(("input", *_ARGUMENTS), args, strict=False)) | kwargs
    return given.get("weight") is None and given.get("bias") is not None


def weight_beside(bias: Tensor | None, weight: Tensor | None, input: Tensor) -> Tensor | None:
    """Return the weight of a layer_norm, or ones for none beside a bias of another type than `input`.

    >>> weight_beside(bias, None, x.bfloat16())
    """
    if weight is None and bias is not None and bias.dtype != input.dtype:
        return torch.ones_like(bias)
    return weight


def in_type_of(value: Any, input: Tensor) -> Any:
    """Return a floating-point tensor on a GPU in the type of `input`; anything else as it is.

    >>> in_type_of(weight, x)
    """
    is_other = isinstance(value, Tensor) and value.is_cuda and value.is_floating_point()
    return value.to(input.dtype) if is_other else value

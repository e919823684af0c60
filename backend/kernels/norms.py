"""Norms of 16-bit inputs with FP32 parameters, which torch refuses on GPUs.

On CPUs torch accepts FP32 parameters beside a 16-bit input, but layer_norm's backward refuses a bias without
a weight: such a call gets a weight of ones. On GPUs layer_norm and group_norm refuse FP32 parameters, and
rms_norm falls back to its slow form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Norms whose parameters must have the input's type on GPUs; batch_norm takes FP32 ones everywhere.
NORMS_OF_ONE_TYPE = ("layer_norm", "group_norm", "rms_norm")
_LAYER_NORMS = (torch.nn.functional.layer_norm, torch.layer_norm)
# layer_norm's arguments after the input
_ARGUMENTS = ("normalized_shape", "weight", "bias", "eps", "cudnn_enable")


def norm(target: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a norm; on a GPU first round its parameters to the type of `input`, differentiably.

    A layer_norm whose only parameter is a bias of another type gets a weight of ones. `target` is
    F.layer_norm, F.group_norm, F.rms_norm or torch's function of the same name.

    >>> norm(F.layer_norm, x.bfloat16(), (768,), weight, bias)
    """
    placed = [in_type_of(value, input) for value in args]
    named = {name: in_type_of(value, input) for name, value in kwargs.items()}
    if target in _LAYER_NORMS:
        named |= dict(zip(_ARGUMENTS, placed, strict=False))
        placed, named["weight"] = [], weight_beside(named.get("bias"), named.get("weight"), input)
    return target(input, *placed, **named)


def has_bias_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of a layer_norm have a bias but no weight.

    >>> has_bias_alone((x, (768,), None, bias), {})
    """
    given = dict(zip(("input", *_ARGUMENTS), args, strict=False)) | kwargs
    return given.get("weight") is None and given.get("bias") is not None


def weight_beside(bias: Tensor | None, weight: Tensor | None, input: Tensor) -> Tensor | None:
    """Return a layer_norm's weight; ones if it is None and the bias has another type than `input`.

    >>> weight_beside(bias, None, x.bfloat16())
    """
    if weight is None and bias is not None and bias.dtype != input.dtype:
        return torch.ones_like(bias)
    return weight


def in_type_of(value: Any, input: Tensor) -> Any:
    """Return a GPU's float tensor in the type of `input`; any other argument unchanged.

    >>> in_type_of(weight, x)
    """
    is_other = isinstance(value, Tensor) and value.is_cuda and value.is_floating_point()
    return value.to(input.dtype) if is_other else value

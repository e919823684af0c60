"""Convert operands to 16 bits, with scales that keep FP16's sums in range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The range in which a power of two and its inverse are both normal FP32 numbers.
_SCALED = (2.0**-126, 2.0**125)


def as_matrix(values: Tensor) -> Tensor:
    """Return values (..., K) as a matrix (rows, K); K may be 0, and a vector is one row."""
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1])


def sixteen_bit_dtype(device: torch.device) -> torch.dtype:
    """Return the device's 16-bit float for products: BF16, or FP16 without BF16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def to_sixteen_bit(values: Tensor, sum_bound: float) -> tuple[Tensor, Tensor | None]:
    """Convert FP32 values to 16 bits; return them and the factor of the product (None for 1).

    BF16 has the range of FP32, FP16 has not. For FP16 the values are scaled by a power of two so that
    sums of values times codes, at most `sum_bound` times the largest value, stay below 65504. The factor
    stays on the device.
    """
    dtype = sixteen_bit_dtype(values.device)
    if dtype is torch.bfloat16 or values.numel() == 0:
        return values.to(dtype), None
    factor, back = power_of_two(values, 65504.0 / sum_bound)
    return (values * factor).to(dtype), back


def power_of_two(values: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """Find the power of two that brings max |values| into [target / 2, target).

    Returns it and its inverse (0-dim). Values that are all zero, NaN or Inf get a finite factor too, and
    stay zero, NaN or Inf.
    """
    largest = torch.linalg.vector_norm(values, math.inf, dtype=torch.float32)
    largest = largest if target == 1.0 else largest / target
    largest = torch.nan_to_num(largest, nan=1.0, posinf=1.0).clamp_(*_SCALED)
    mantissa = torch.frexp(largest).mantissa  # in [1/2, 1): the quotients below are exact
    return mantissa / largest, largest / mantissa

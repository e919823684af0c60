"""Matrix products of low-precision data: INT8 with INT32 sums, and 16-bit with FP32 sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# 127 * 127 * 133144 < 2^31: a longer inner dimension could overflow the INT32 sum, so it is summed in pieces.
LONGEST_INT32_SUM = (2**31 - 1) // 127**2
# The least and the largest number whose power of two and its inverse are normal numbers of FP32.
_SCALED = (2.0**-126, 2.0**125)


def int8_sums(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply INT8 matrices a (M, K) and b (K, N) exactly, as INT32 (M, N).

    Strides are free. On CPUs `out`, dense rows in INT32, receives the result unless the returned tensor
    is FP32. An inner dimension so long that INT32 might overflow is summed in pieces, in FP32. On CUDA
    the operands are padded to the sizes that cuBLASLt takes (M > 16, K and N multiples of 8).
    """
    inner = a.shape[1]
    if inner > LONGEST_INT32_SUM:
        half = inner // 2
        return int8_sums(a[:, :half], b[:half]).float().add_(int8_sums(a[:, half:], b[half:]))
    if a.is_cuda:
        return _int_mm_cuda(a, b)
    a, b = _with_plain_strides(a), _with_plain_strides(b)
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


def as_matrix(values: Tensor) -> Tensor:
    """Return values (..., K) as a matrix (rows, K), where K may be 0; a vector is one row."""
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1])


def _with_plain_strides(matrix: Tensor) -> Tensor:
    """Return the matrix with strides that oneDNN accepts.

    `torch._int_mm` passes a stride to oneDNN as the leading dimension, unchecked. If it is too small
    (expanded matrices; the arbitrary stride of a dimension of size 1), the sums are never written, and no
    error is raised (pytorch#195066, seen in torch 2.13).
    """
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    plain = (right == 1 and down >= columns) or (down == 1 and right >= rows)
    return matrix if plain and 1 not in matrix.shape else matrix.reshape(-1).contiguous().view(matrix.shape)


def _int_mm_cuda(a: Tensor, b: Tensor) -> Tensor:
    """Call `torch._int_mm` within cuBLASLt's limits: row-major times column-major, padded."""
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    if 0 in (rows, inner, columns):
        return a.new_zeros(rows, columns, dtype=torch.int32)
    pad_rows = max(0, 24 - rows) if rows <= 16 else 0
    pad_inner, pad_columns = -inner % 8, -columns % 8
    b = b.t()
    if pad_rows or pad_inner:
        a = torch.nn.functional.pad(a, (0, pad_inner, 0, pad_rows))
    if pad_inner or pad_columns:
        b = torch.nn.functional.pad(b, (0, pad_inner, 0, pad_columns))
    return torch._int_mm(a.contiguous(), b.contiguous().t())[:rows, :columns].contiguous()


def sixteen_bit_dtype(device: torch.device) -> torch.dtype:
    """Return the 16-bit float that the device multiplies: BF16, or FP16 where it has no BF16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def to_sixteen_bit(values: Tensor, sum_bound: float) -> tuple[Tensor, Tensor | None]:
    """Convert FP32 values to 16 bits, and return the product's factor (None for 1).

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
    mantissa = torch.frexp(largest).mantissa  # in [1/2, 1): the quotients are exact
    return mantissa / largest, largest / mantissa

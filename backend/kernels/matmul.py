"""Batched products of activations in INT8, with backward products in BF16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import decode_rows
from qsync.backend.encoding import Encoded, Operand, memory_order
from qsync.backend.int8_products import scaled_product
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.sixteen_bit_operands import as_matrix, sixteen_bit_dtype

# FP32 is exact for integers up to 2^24: the sum of 1040 products of two codes.
LONGEST_FP32_SUM = 2**24 // 127**2


def matmul_int8(target: Callable[..., Tensor], out_type: str, input: Operand, other: Operand) -> Tensor:
    """Multiply batched matrices, y = A B, in INT8; compute gradients by BF16 products.

        y  = s_a s_b (A B)               A, B the INT8 codes; s_a per row of A, s_b per column of B
        dA = bf16(g) bf16(s_b B)',   dB = bf16(s_a A)' bf16(g)

    A (..., M, K) encoded "row", B (..., K, N) encoded "inner"; the dimensions before those broadcast, and
    a vector is a row, or a column, as in torch.matmul. Saves the codes and scales only. On devices with
    FP16 and no BF16 the backward products are in FP32, because decoded values may leave FP16's range.

    >>> matmul_int8(torch.matmul, "fp32", Operand(a, a8), Operand(b, encode(b, "int8_inner")))
    """
    encoded = (input.encoded, other.encoded)
    return differentiable(_Int8Matmul, input.value, other.value, *encoded, DTYPES[out_type])


class _Int8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, a_encoded: Encoded, b_encoded: Encoded, dtype: torch.dtype
    ) -> Tensor:
        codes = (_matrices(a_encoded.data, -2), _matrices(b_encoded.data, -1))
        scales = (_matrices(a_encoded.code_scale, -2), _matrices(b_encoded.code_scale, -1))
        y = scaled_products(*codes, *scales, dtype)
        need_a, need_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((codes[0], scales[0]) if need_b else (None, None)),
            *((codes[1], scales[1]) if need_a else (None, None)),
        )
        ctx.operands = ((a.shape, a.dtype), (b.shape, b.dtype))
        ctx.matrices = y.shape
        shape = [*y.shape[:-2], *y.shape[-2:-1][: a.ndim - 1], *y.shape[-1:][: b.ndim - 1]]
        return owned(y.view(shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a_codes, a_scale, b_codes, b_scale = ctx.saved_tensors
        (a_shape, a_dtype), (b_shape, b_dtype) = ctx.operands
        g = gradient.reshape(ctx.matrices).to(_gradient_dtype(gradient.device))
        da = db = None
        if b_codes is not None:
            da = _summed(g @ decode_matrices(b_codes, b_scale).mT, a_shape, -2).to(a_dtype)
        if a_codes is not None:
            a = decode_matrices(a_codes, a_scale)
            if len(b_shape) == 2:  # one B for all A: its gradient is one product, already summed
                a, g = a.flatten(0, -2), g.flatten(0, -2)
            db = _summed(a.mT @ g, b_shape, -1).to(b_dtype)
        return da, db, None, None, None


def _matrices(operand: Tensor, dim: int) -> Tensor:
    """Return a vector as a matrix: one row (dim -2) or one column (dim -1)."""
    return operand.unsqueeze(dim) if operand.ndim == 1 else operand


def _summed(gradient: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return a broadcast operand's gradient, summed in FP32 over the broadcast dimensions."""
    wanted = [1, *shape] if dim == -2 else [*shape, 1]
    wanted = wanted if len(shape) == 1 else list(shape)
    if list(gradient.shape) == wanted:
        return gradient.view(shape)
    return gradient.float().sum_to_size(wanted).view(shape)


def _gradient_dtype(device: torch.device) -> torch.dtype:
    """Return the type of backward products on a device."""
    return torch.bfloat16 if sixteen_bit_dtype(device) is torch.bfloat16 else torch.float32


def scaled_products(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows columns (a b) in `dtype`, from codes a and b.

    a (..., M, K), b (..., K, N), rows (..., M, 1), columns (..., 1, N).
    """
    if b.ndim == 2:  # all rows in one product
        y = scaled_product(as_matrix(a), b, rows.reshape(-1), columns.reshape(-1), None, dtype)
        return y.view(*a.shape[:-1], b.shape[-1])
    if a.is_cuda and a.shape[-1] <= LONGEST_FP32_SUM:
        return _batched_products(a, b).mul_(rows).mul_(columns).to(dtype)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    size = (math.prod(batch), a.shape[-2], b.shape[-1])
    left, right, row, column = (
        matrices.expand(*batch, *matrices.shape[-2:]).reshape(size[0], *matrices.shape[-2:])
        for matrices in (a, b, rows, columns)
    )
    factors = (row.flatten(1).contiguous().unbind(), column.flatten(1).contiguous().unbind())
    y = torch.empty(size, dtype=dtype, device=a.device)
    for one, other, row_scale, column_scale, result in zip(
        left.unbind(), right.unbind(), *factors, y.unbind(), strict=True
    ):
        scaled_product(one, other, row_scale, column_scale, None, dtype, out=result)
    return y.view(*batch, *size[1:])


def _batched_products(a: Tensor, b: Tensor) -> Tensor:
    """Compute exact integer products in 16-bit floats: torch has no batched INT8 product on GPUs."""
    dtype = sixteen_bit_dtype(a.device)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    count = math.prod(batch)
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(count, *t.shape[-2:]).to(dtype) for t in (a, b))
    sums = torch.bmm(left, right, out_dtype=torch.float32)
    return sums.view(*batch, *sums.shape[1:])


def decode_matrices(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes * scale in the type of backward products, in the codes' memory order.

    `scale` broadcasts. Takes one pass if elements with a common scale are adjacent in memory.
    """
    dtype, order = _gradient_dtype(codes.device), memory_order(codes)
    if (
        dtype is torch.bfloat16
        and order is not None
        and scale.shape[order[-1]] == 1
        and scale.numel() * codes.shape[order[-1]] == codes.numel() > 0
    ):
        in_memory = codes.permute(order)
        rows = in_memory.reshape(-1, in_memory.shape[-1])
        decoded = decode_rows(rows, scale.permute(order).reshape(-1)).view(in_memory.shape)
        return decoded.permute([order.index(d) for d in range(codes.ndim)])
    return codes.float().mul_(scale).to(dtype)

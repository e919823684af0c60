"""Linear layers in FP16 or TF32 as one autograd function, without a nested graph.

`fp16_tf32` computes any product, but takes the host 1.3 to 1.6 times as long for a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable
from qsync.backend.encoding import Operand
from qsync.backend.kernels.fp16_tf32 import allow_tf32, product_fp16, product_tf32, scaled, unscaled
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.sixteen_bit_operands import as_matrix


def linear_fp16(
    target: Callable[..., Tensor], out_type: str, input: Operand, weight: Operand, bias: Operand | None = None
) -> Tensor:
    """Compute a linear layer on FP16 operands; return gradients in true scale.

        y  = fp16(x) fp16(W)' + fp16(b),   h = fp16(2^k g),   k: 1/2 <= max |2^k g| < 1
        dx = 2^-k h fp16(W),   dW = 2^-k h' fp16(x),   db = sum g in FP32

    x (..., K), W (N, K), b (N), all encoded "fp16"; y (..., N) is in `out_type`. Saves x and W in FP16. A
    bias of another shape runs through `product_fp16`.

    >>> linear_fp16(F.linear, "fp32", *(Operand(t, encode(t, "fp16")) for t in (x, w, b)))
    """
    if bias is not None and bias.value.shape != weight.value.shape[:1]:
        return product_fp16(target, out_type, input, weight, bias)
    return _half(input, weight, weight.encoded.data, bias, out_type)


def addmm_fp16(
    target: Callable[..., Tensor],
    out_type: str,
    input: Operand,
    mat1: Operand,
    mat2: Operand,
    **factors: float,
) -> Tensor:
    """Compute addmm(b, x, W) as `linear_fp16`, with W stored (K, N).

    Calls with alpha, beta or a bias of another shape than (N,) run through `product_fp16`.

    >>> addmm_fp16(torch.addmm, "fp32", *(Operand(t, encode(t, "fp16")) for t in (b, x, w)))
    """
    if factors or input.value.shape != mat2.value.shape[1:]:
        return product_fp16(target, out_type, input, mat1, mat2, **factors)
    return _half(mat1, mat2, mat2.encoded.data.t(), input, out_type, True)


def linear_tf32(
    target: Callable[..., Tensor], out_type: str, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute a linear layer with TF32 products, whatever torch's global TF32 switches are.

    A bias of another shape than (N,) runs through `product_tf32`.

    >>> linear_tf32(F.linear, "fp32", x, weight, bias)
    """
    if bias is not None and bias.shape != weight.shape[:1]:
        return product_tf32(target, out_type, input, weight, bias)
    added = None if bias is None else bias.detach()
    call = _Call(input.detach(), weight.detach(), added, DTYPES[out_type])
    return differentiable(_Product, input, weight, bias, call)


def addmm_tf32(
    target: Callable[..., Tensor], out_type: str, input: Tensor, mat1: Tensor, mat2: Tensor, **factors: float
) -> Tensor:
    """Compute addmm(b, x, W) as `linear_tf32`, with W stored (K, N).

    >>> addmm_tf32(torch.addmm, "fp32", b, x, w)
    """
    if factors or input.shape != mat2.shape[1:]:
        return product_tf32(target, out_type, input, mat1, mat2, **factors)
    call = _Call(mat1.detach(), mat2.detach().t(), input.detach(), DTYPES[out_type], True)
    return differentiable(_Product, mat1, mat2, input, call)


def _half(
    x: Operand, weight: Operand, rows: Tensor, bias: Operand | None, out_type: str, transposed: bool = False
) -> Tensor:
    added, b = (None, None) if bias is None else (bias.encoded.data, bias.value)
    call = _Call(x.encoded.data, rows, added, DTYPES[out_type], transposed)
    return differentiable(_Product, x.value, weight.value, b, call)


class _Call(NamedTuple):
    """Options of a linear call: converted x, W (N, K) and b, and the result's type.

    `is_stored_transposed` means that the weight is stored (K, N).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    is_stored_transposed: bool = False


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.half = call.x.dtype is torch.float16
        with allow_tf32(not ctx.half):
            y = torch.nn.functional.linear(call.x, call.weight, call.bias)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(call.x if need_w else None, call.weight if need_x else None)
        ctx.x, ctx.weight_dtype = (x.shape, x.dtype), weight.dtype
        ctx.is_transposed = call.is_stored_transposed
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y.to(call.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = as_matrix(gradient)
        h, back = scaled(g) if ctx.half else (g.float(), None)
        dx = dw = db = None
        with allow_tf32(not ctx.half):
            if weight is not None:
                dx = unscaled(h @ weight, back, ctx.x[1]).view(ctx.x[0])
            if x is not None:
                rows = as_matrix(x)
                dw = unscaled(rows.t() @ h if ctx.is_transposed else h.t() @ rows, back, ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            db = g.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None

"""Linear layers in FP8 on GPUs by `torch._scaled_mm`: E4M3 forward, E5M2 gradients, one scale per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import nearest_codes
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.kernels.linear import DTYPES
from qsync.errors import UnsupportedError


def linear_fp8(
    target: Callable[..., Tensor], out_type: str, input: Operand, weight: Operand, bias: Tensor | None = None
) -> Tensor:
    """Compute y = x W' + b with x and W in E4M3, gradients in E5M2, all three products in FP8.

        y  = s_x s_w (X W') + b
        dx = s_h (H W),  H = e5m2(g s_w / s_h);   dW = s_k (K' X),  K = e5m2(g s_x / s_k)

    s_h per row, s_k per output: folding s_w and s_x into g leaves one scale per row of each product, as
    the hardware requires. x (..., K), W (N, K), both encoded "row".

    >>> linear_fp8(F.linear, "fp32", Operand(x, encode(x, "fp8_row")), Operand(w, encode(w, "fp8_row")), b)
    """
    return _product(input, weight, bias, out_type)


def addmm_fp8(
    target: Callable[..., Tensor],
    out_type: str,
    input: Tensor,
    mat1: Operand,
    mat2: Operand,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Compute addmm(b, x, W) as `linear_fp8`, with W stored (K, N) and encoded "col".

    >>> addmm_fp8(torch.addmm, "fp32", b, Operand(x, encode(x, "fp8_row")), Operand(w, encode(w, "fp8_col")))
    """
    if alpha != 1 or beta != 1:
        raise UnsupportedError(f"addmm with alpha={alpha} and beta={beta} has no FP8 kernel: keep it in FP32")
    return _product(mat1, mat2, input, out_type)


def _product(x: Operand, weight: Operand, bias: Tensor | None, out_type: str) -> Tensor:
    return differentiable(
        _Fp8Product, x.value, weight.value, bias, x.encoded, weight.encoded, DTYPES[out_type]
    )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_encoded: Encoded,
        w_encoded: Encoded,
        dtype: torch.dtype,
    ) -> Tensor:
        x_codes = x_encoded.data.reshape(-1, x_encoded.data.shape[-1])
        x_scale, w_scale = x_encoded.code_scale.reshape(-1, 1), w_encoded.code_scale.reshape(1, -1)
        out = _scaled_product(x_codes, w_encoded.data.t(), x_scale, w_scale)
        if bias is not None:
            out = out.view(*x_encoded.data.shape[:-1], out.shape[-1]) + bias
        ctx.save_for_backward(x_codes, x_scale, w_encoded.data, w_scale)
        ctx.x, ctx.weight_dtype = (x.shape, x.dtype), weight.dtype
        ctx.weight_is_transposed = w_encoded.layout == "col"
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return owned(out.view(*x_encoded.data.shape[:-1], out.shape[-1]).to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        g = gradient.reshape(-1, gradient.shape[-1]).float()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            codes, scale = nearest_codes(g * w_scale, (1,), "fp8_gradient")
            dx = _scaled_product(codes, w_codes, scale, scale.new_ones(1, w_codes.shape[1]))
            dx = dx.view(ctx.x[0]).to(ctx.x[1])
        if ctx.needs_input_grad[1]:
            codes, scale = nearest_codes(g * x_scale, (0,), "fp8_gradient")
            dw = _scaled_product(codes.t(), x_codes, scale.t(), scale.new_ones(1, x_codes.shape[1]))
            dw = (dw.t() if ctx.weight_is_transposed else dw).to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            db = gradient.float().sum_to_size(ctx.bias[0]).to(ctx.bias[1])
        return dx, dw, db, None, None, None


def _scaled_product(a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """Return row_scale column_scale (a b) in FP32 from FP8 a (M, K) and b (K, N).

    Sizes are padded to multiples of 16. `torch._scaled_mm` with row scales returns BF16, so the product
    is rounded once more than in the equation.
    """
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    if rows == 0:
        return a.new_zeros(rows, columns, dtype=torch.float32)
    a, b = _padded(a, -rows % 16, -inner % 16), _padded(b.t(), -columns % 16, -inner % 16)
    # Flattened and reshaped, because torch wants a stride of 1 even along a dimension of size 1.
    of_row = torch.nn.functional.pad(row_scale.flatten(), (0, -rows % 16)).contiguous().unsqueeze(1)
    of_column = torch.nn.functional.pad(column_scale.flatten(), (0, -columns % 16)).contiguous().unsqueeze(0)
    out = torch._scaled_mm(a, b.t(), scale_a=of_row, scale_b=of_column, out_dtype=torch.bfloat16)
    return out[:rows, :columns].float()


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    # FP8 tensors cannot be padded; zero is the byte 0 in every format.
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows))
    return padded.contiguous().view(codes.dtype)

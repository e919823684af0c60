"""INT8 (dequantized in the epilogue) and FP16 linear layers on NVIDIA GPUs, through CUTLASS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import round_columns, round_rows
from qsync.backend.casts.epilogues import Activation
from qsync.backend.cutlass.products import Scaling, gemm
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.kernels.fp16_tf32 import product_fp16
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.sixteen_bit_operands import power_of_two
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision

# Gradients are scaled so that their largest element is below this: half of FP16's range, so that no rounding
# overflows. Sums are FP32 and cannot overflow.
LARGEST_FP16 = 32768.0


def linear(precision: Precision) -> Callable[..., Tensor]:
    """Return the kernel of linear layers in `int8`, `int8_all` or `fp16`.

        int8      y = s_x s_w (X W') + b,   dx = fp16(g s_w) W,   dW = fp16(g s_x)' X
        int8_all  the same y,   dx = s_h (H W),   dW = s_k (K' X)    H, K: stochastic INT8 of g s_w, g s_x
        fp16      y = fp16(x) fp16(W)' + b,   dx = fp16(g) fp16(W),   dW = fp16(g)' fp16(x)

    Sums are INT32 or FP32. A gradient is scaled by a power of two before it becomes FP16, and the epilogue
    scales the result back; the factor stays on the GPU. Saves only codes and scales. torch computes an
    `activation` after the product.

    >>> linear(Precision.INT8)(F.linear, "fp32", Operand(x, x8), Operand(w, w8), bias)
    """

    def kernel(
        target: Callable[..., Tensor],
        out_type: str,
        input: Operand,
        weight: Operand,
        bias: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        y = _apply(input, weight, bias, _Plan(precision, False, DTYPES[out_type]))
        return y if activation is None else activation(y)

    return kernel


def addmm(precision: Precision) -> Callable[..., Tensor]:
    """Return the kernel of addmm in `int8`, `int8_all` or `fp16`: `linear` with W stored (K, N).

    INT8 raises UnsupportedError for alpha other than 1, or beta other than 0 and 1; FP16 then runs torch's
    addmm.

    >>> addmm(Precision.INT8)(torch.addmm, "fp32", b, Operand(x, x8), Operand(w, encode(w, "int8_col")))
    """

    def kernel(
        target: Callable[..., Tensor],
        out_type: str,
        input: Tensor,
        mat1: Operand,
        mat2: Operand,
        *,
        beta: float = 1,
        alpha: float = 1,
        activation: Activation | None = None,
    ) -> Tensor:
        if alpha != 1 or beta not in (0, 1):
            if precision is Precision.FP16:
                return product_fp16(target, out_type, input, mat1, mat2, beta=beta, alpha=alpha)
            raise UnsupportedError(
                f"addmm with alpha={alpha} and beta={beta} has no {precision} kernel: keep it in FP32"
            )
        y = _apply(mat1, mat2, input if beta else None, _Plan(precision, True, DTYPES[out_type]))
        return y if activation is None else activation(y)

    return kernel


class _Plan(NamedTuple):
    """Shapes and options of a linear call; `transposed` if W is stored (K, N), as in addmm."""

    precision: Precision
    transposed: bool
    dtype: torch.dtype


def _apply(x: Operand, weight: Operand, bias: Operand | Tensor | None, plan: _Plan) -> Tensor:
    # FP16 encodes the bias as well; it is still added in FP32.
    bias = bias.value if isinstance(bias, Operand) else bias
    return differentiable(_Linear, x.value, weight.value, bias, x.encoded, weight.encoded, plan)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_encoded: Encoded,
        w_encoded: Encoded,
        plan: _Plan,
    ) -> Tensor:
        x_data = x_encoded.data.reshape(-1, x_encoded.data.shape[-1])
        half = plan.precision is Precision.FP16
        w_data = w_encoded.data if half else _rows(w_encoded)
        x_scale, w_scale = _flat(x_encoded.scale), _flat(w_encoded.scale)
        num_outputs = w_data.shape[1] if half and plan.transposed else len(w_data)
        fused = bias is not None and bias.shape == (num_outputs,)
        scaling = Scaling(rows=x_scale, columns=w_scale, bias=bias if fused else None)
        product = "int8_nt" if not half else "fp16_nn" if plan.transposed else "fp16_nt"
        out = gemm(product, x_data, w_data, scaling, plan.dtype)
        if bias is not None and not fused:  # torch broadcasts a bias of any shape to the result's
            out = out.view(*x_encoded.data.shape[:-1], num_outputs) + bias.to(out.dtype)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_data, x_scale) if need_w else (None, None)), *((w_data, w_scale) if need_x else (None, None))
        )
        ctx.plan, ctx.x, ctx.weight_dtype = plan, (x.shape, x.dtype), weight.dtype
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return owned(out.view(*x_encoded.data.shape[:-1], out.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        g = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        integer, transposed = ctx.plan.precision is Precision.INT8_ALL, ctx.plan.transposed
        dx = dw = db = None
        if w_data is not None:
            dtype = ctx.x[1] if ctx.x[1] in DTYPES.values() else torch.float32
            if integer:
                dx = _input_gradient_int8(g, w_data, w_scale, dtype)
            else:
                # Encoded INT8 weights are always (N, K); FP16 ones lie as they were stored.
                dx = _input_gradient(g, w_data, w_scale, transposed and w_scale is None, dtype)
            dx = dx.view(ctx.x[0]).to(ctx.x[1])
        if x_data is not None:
            dw = (_weight_gradient_int8 if integer else _weight_gradient)(g, x_data, x_scale, transposed)
            dw = dw.to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            plain = shape == g.shape[1:]
            db = g.sum(0, dtype=torch.float32) if plain else gradient.float().sum_to_size(shape)
            db = db.to(dtype)
        return dx, dw, db, None, None, None


def to_fp16(g: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return 2^k g * factors in FP16, and 2^-k (one element; None for an empty g)."""
    values = g.float() if factors is None else g * factors
    if values.numel() == 0:
        return values.to(torch.float16), None
    factor, back = power_of_two(values, LARGEST_FP16)
    return (values * factor).to(torch.float16), back


def _input_gradient(
    g: Tensor, w_data: Tensor, w_scale: Tensor | None, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """Compute dx (M, K) = (g s_w) W, with g (M, N) and W (N, K), or (K, N) if transposed."""
    h, back = to_fp16(g, w_scale)
    return gemm(
        "fp16_nt" if transposed else "fp16_nn", h, w_data.to(torch.float16), Scaling(alpha=back), dtype
    )


def _weight_gradient(g: Tensor, x_data: Tensor, x_scale: Tensor | None, transposed: bool) -> Tensor:
    """Compute dW = (g s_x)' x, (N, K), or its transpose."""
    h, back = to_fp16(g, None if x_scale is None else x_scale.unsqueeze(1))
    x16 = x_data.to(torch.float16)
    return gemm("fp16_tn", *((x16, h) if transposed else (h, x16)), Scaling(alpha=back))


def _input_gradient_int8(g: Tensor, w_codes: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute dx = s_h (H W) from a transposed copy of W: tensor cores read INT8 along rows."""
    codes, scale = round_rows(g, w_scale)
    return gemm("int8_nt", codes, w_codes.t().contiguous(), Scaling(rows=scale), dtype)


def _weight_gradient_int8(g: Tensor, x_codes: Tensor, x_scale: Tensor, transposed: bool) -> Tensor:
    """Compute dW = s_k (K' X), or its transpose, from transposed copies of K and X."""
    codes, scale = round_columns(g, x_scale)
    k, x = codes.t().contiguous(), x_codes.t().contiguous()
    if transposed:
        return gemm("int8_nt", x, k, Scaling(columns=scale))
    return gemm("int8_nt", k, x, Scaling(rows=scale))


def _rows(weight: Encoded) -> Tensor:
    """Return W's codes as (N, K) with contiguous rows; the copy is made once per encoding."""
    if weight.data.is_contiguous():
        return weight.data
    if "rows" not in weight.packed:
        weight.packed["rows"] = weight.data.contiguous()
    rows: Tensor = weight.packed["rows"]
    return rows


def _flat(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)

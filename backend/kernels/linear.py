"""Linear layers in INT8, with backward products in 16 bits or in INT8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import (
    decode_rows,
    round_columns,
    round_rows,
    sum_columns,
    to_bf16_and_sum,
)
from qsync.backend.casts.epilogues import Activation, activation_gradient_and_sum
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.int8_products import activated_product, scaled_product
from qsync.backend.kernels.linear_bf16 import transposed_product
from qsync.backend.sixteen_bit_operands import as_matrix, sixteen_bit_dtype, to_sixteen_bit
from qsync.errors import UnsupportedError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def linear_int8(
    target: Callable[..., Tensor],
    out_type: str,
    input: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Compute a linear layer y = x W' + b with x and W in INT8, gradients by 16-bit products.

        y  = s_x s_w (X W') + b          X, W the INT8 codes; s_x per row, s_w per output
        dx = bf16(g) bf16(s_w W),   dW = bf16(g)' bf16(s_x X),   db = sum g

    x (..., K) encoded "row", W (N, K) encoded "row", b (N), or any shape that broadcasts to the result's, in
    FP32; the result (..., N) is in `out_type`. Saves the codes and scales only. On devices with FP16 and no
    BF16 the scales multiply g instead, because decoded values may leave FP16's range. With an `activation` f
    the result is f(y), and g its gradient times f'(y): gelu saves y in `out_type`, relu its result, as torch
    would.

    >>> linear_int8(F.linear, "fp32", Operand(x, x8), Operand(w, w8), b)
    """
    return _apply(input, weight, bias, out_type, False, activation)


def linear_int8_all(
    target: Callable[..., Tensor],
    out_type: str,
    input: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Compute a linear layer with INT8 products forward and backward, gradients rounded stochastically.

        dx = s_h (H W),    H = stochastic INT8 of g s_w, one scale s_h per row
        dW = s_k (K' X),   K = stochastic INT8 of g s_x, one scale s_k per output

    >>> linear_int8_all(F.linear, "fp32", Operand(x, x8), Operand(w, w8))
    """
    return _apply(input, weight, bias, out_type, True, activation)


def addmm_int8(
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
    """Compute addmm(b, x, W) as `linear_int8`, with W stored (K, N) and encoded "col".

    Raises UnsupportedError for alpha other than 1, or beta other than 0 and 1.

    >>> addmm_int8(torch.addmm, "fp32", b, Operand(x, x8), Operand(w, encode(w, "int8_col")))
    """
    return _apply(mat1, mat2, _addmm_bias(input, beta, alpha), out_type, False, activation)


def addmm_int8_all(
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
    """Compute addmm(b, x, W) as `linear_int8_all`, with W stored (K, N) and encoded "col".

    >>> addmm_int8_all(torch.addmm, "fp32", b, Operand(x, x8), Operand(w, encode(w, "int8_col")))
    """
    return _apply(mat1, mat2, _addmm_bias(input, beta, alpha), out_type, True, activation)


def _addmm_bias(bias: Tensor, beta: float, alpha: float) -> Tensor | None:
    if alpha != 1 or beta not in (0, 1):
        raise UnsupportedError(
            f"addmm with alpha={alpha} and beta={beta} has no INT8 kernel: keep it in FP32"
        )
    return bias if beta else None


def _apply(
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    out_type: str,
    integer_gradients: bool,
    activation: Activation | None,
) -> Tensor:
    call = _Call(x.encoded, weight.encoded, DTYPES[out_type], integer_gradients, activation)
    return differentiable(_Int8Product, x.value, weight.value, bias, call)


class _Call(NamedTuple):
    """Options of an INT8 linear call without its differentiable tensors; `dtype` is the result's."""

    x: Encoded
    weight: Encoded
    dtype: torch.dtype
    integer_gradients: bool
    activation: Activation | None


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        dtype, activation = call.dtype, call.activation
        x_codes = as_matrix(call.x.data)
        x_scale, w_scale = call.x.code_scale.reshape(-1), call.weight.code_scale.reshape(-1)
        fused, added = (bias, None) if bias is None or bias.shape == w_scale.shape else (None, bias)
        factors = (x_codes, call.weight.data.t(), x_scale, w_scale, fused)
        saved = None
        if activation is not None and added is None:
            saved, out = activated_product(*factors, dtype, activation)
        else:
            out = scaled_product(*factors, dtype if added is None else torch.float32)
            if added is not None:  # torch broadcasts a bias of any shape to the result's
                out = out.view(*call.x.data.shape[:-1], out.shape[-1]).add_(added).to(dtype)
            if activation is not None:
                saved, out = out, activation(out)
                saved = out if activation.kind == "relu" else saved
        result = owned(out.view(*call.x.data.shape[:-1], out.shape[-1]))
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_codes, x_scale) if need_w else (None, None)),
            *((call.weight.data, w_scale) if need_x else (None, None)),
            result if saved is out else saved,
        )
        ctx.x = (x.shape, x.dtype)
        ctx.weight_dtype, ctx.weight_is_transposed = weight.dtype, call.weight.layout == "col"
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.integer_gradients, ctx.activation = call.integer_gradients, activation
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale, activated = ctx.saved_tensors
        x = None if x_codes is None else _Codes(x_codes, x_scale)
        weight = None if w_codes is None else _Codes(w_codes, w_scale)
        saved = _Saved(x, weight, ctx.weight_is_transposed)
        g = as_matrix(gradient).contiguous()
        sums = None
        decoding = not ctx.integer_gradients and sixteen_bit_dtype(g.device) is torch.bfloat16
        if ctx.activation is not None:
            # Round after summing the gradient of a broadcast bias.
            rounded = decoding and (ctx.bias is None or ctx.bias[0] == g.shape[1:])
            dtype = torch.bfloat16 if rounded else g.dtype
            g, sums = activation_gradient_and_sum(g, activated.view(g.shape), ctx.activation, dtype)
        if ctx.integer_gradients:
            dx, dw = _integer_gradients(g, saved, ctx.x[1])
        elif decoding:
            h, sums = to_bf16_and_sum(g) if g.dtype is torch.float32 else (g, sums)
            dx, dw = _decoded_gradients(h, saved)
        else:
            dx, dw = _folded_gradients(g.float(), saved)
        if dx is not None:
            dx = dx.view(ctx.x[0]).to(ctx.x[1])
        if dw is not None:
            dw = dw.to(ctx.weight_dtype)
        db = None
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            if shape != g.shape[1:]:
                sums = g.float().view(gradient.shape).sum_to_size(shape)
            db = (sum_columns(g) if sums is None else sums).to(dtype)
        return dx, dw, db, None


class _Codes(NamedTuple):
    """Saved INT8 codes with 1-D scales: one per row of x, one per output of W."""

    codes: Tensor
    scale: Tensor


class _Saved(NamedTuple):
    """Saved operands of a linear layer: x (M, K) for dW, W (N, K) for dx; None if not needed."""

    x: _Codes | None
    weight: _Codes | None
    weight_is_transposed: bool

    def weight_gradient(self, h: Tensor, x: Tensor) -> Tensor:
        """Return dW = h' x, in the orientation of the stored weight."""
        return transposed_product(*((x, h) if self.weight_is_transposed else (h, x)))


def _decoded_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx = g bf16(s_w W) and dW = g' bf16(s_x X), g in BF16.

    Relative error against an FP32 g: 0.0029, or 0.0023 with the scales folded into g; INT8's own is 0.01.
    """
    dx = dw = None
    if saved.weight is not None:
        dx = g @ decode_rows(*saved.weight)
    if saved.x is not None:
        dw = saved.weight_gradient(g, decode_rows(*saved.x))
    return dx, dw


def _folded_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx = fp16(g s_w) W and dW = fp16(g s_x)' X; the INT8 codes are exact in FP16."""
    dx = dw = None
    # Both scaled gradients go through one buffer: 0.5 ms less than two fresh ones of 6 MB, which cost
    # page faults (Zen 5, one thread).
    scaled = torch.empty_like(g)
    if saved.weight is not None:
        codes, scale = saved.weight
        h, back = to_sixteen_bit(torch.mul(g, scale, out=scaled), 127.0 * g.shape[1])
        dx = _scaled_back(h @ codes.to(h.dtype), back)
    if saved.x is not None:
        codes, scale = saved.x
        h, back = to_sixteen_bit(torch.mul(g, scale.unsqueeze(1), out=scaled), 127.0 * max(g.shape[0], 1))
        dw = _scaled_back(saved.weight_gradient(h, codes.to(h.dtype)), back)
    return dx, dw


def _scaled_back(product: Tensor, back: Tensor | None) -> Tensor:
    return product if back is None else product.float().mul_(back)


def _integer_gradients(g: Tensor, saved: _Saved, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Compute unbiased dx (in `dtype`) and dW (in FP32) by INT8 products of stochastic codes."""
    dx = dw = None
    if saved.weight is not None:
        weight = saved.weight
        codes, scale = round_rows(g, weight.scale)
        ones = scale.new_ones(weight.codes.shape[1])
        dx = scaled_product(codes, weight.codes, scale, ones, None, dtype)
    if saved.x is not None:
        x = saved.x
        codes, scale = round_columns(g, x.scale)
        ones = scale.new_ones(x.codes.shape[1])
        if saved.weight_is_transposed:
            dw = scaled_product(x.codes.t(), codes, ones, scale, None, torch.float32)
        else:
            dw = scaled_product(codes.t(), x.codes, scale, ones, None, torch.float32)
    return dx, dw

"""Linear layers in INT8: the forward product in INT8, the two backward products in 16 bits or in INT8 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsync.backend.casts.cast_ops import (
    decode_rows,
    dequantize,
    narrow_and_sum,
    round_columns,
    round_rows,
    sum_columns,
)
from qsync.backend.casts.epilogues import Activation, changed_and_summed, dequantize_activated
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.matmul_primitives import int8_sums, narrow_dtype, to_narrow
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
    """Y = x W' + b with x and W in INT8, gradients through 16-bit products.

        y  = s_x s_w (X W') + b          X, W the INT8 codes; s_x per row, s_w per output          (ours)
        dx = bf16(g) bf16(s_w W),   dW = bf16(g)' bf16(s_x X),   db = sum g

    x (..., K) encoded "row", W (N, K) encoded "row", b (N) in FP32; the result (..., N) is in `out_type`.
    Saves the codes and scales only. Where there is FP16 and no BF16 the scales go to g instead, because
    decoded values may leave its range. With an `activation` f the result is f(y), and g its gradient times
    f'(y): gelu saves y in `out_type`, relu its result, as torch would.

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
    """`linear_int8` with INT8 gradient products as well, their gradient rounded stochastically.

        dx = s_h (H W),    H = stochastic INT8 of g s_w, one scale s_h per row                     (ours)
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
    """`linear_int8` for addmm(b, x, W) with W stored (K, N) and encoded "col".

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
    """`linear_int8_all` for addmm(b, x, W) with W stored (K, N) and encoded "col".

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
    return _Int8Product.apply(
        x.value,
        weight.value,
        bias,
        x.encoded,
        weight.encoded,
        DTYPES[out_type],
        integer_gradients,
        activation,
    )


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_encoded: Encoded,
        w_encoded: Encoded,
        dtype: torch.dtype,
        integer_gradients: bool,
        activation: Activation | None,
    ) -> Tensor:
        x_codes = x_encoded.data.reshape(-1, x_encoded.data.shape[-1])
        x_scale, w_scale = x_encoded.scale.reshape(-1), w_encoded.scale.reshape(-1)
        offsets, rest = (bias, None) if bias is None or bias.shape == w_scale.shape else (None, bias)
        sums = int8_sums(x_codes, w_encoded.data.t())
        kept = None
        if activation is not None and rest is None:
            kept, out = dequantize_activated(sums, x_scale, w_scale, offsets, dtype, activation)
        else:
            out = dequantize(sums, x_scale, w_scale, offsets, dtype if rest is None else torch.float32)
            if rest is not None:  # addmm broadcasts any shape
                out = out.add_(rest).to(dtype)
            if activation is not None:
                kept, out = out, activation(out)
                kept = out if activation.kind == "relu" else kept
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_codes, x_scale) if need_w else (None, None)),
            *((w_encoded.data, w_scale) if need_x else (None, None)),
            kept,
        )
        ctx.x = (x.shape, x.dtype)
        ctx.weight_dtype, ctx.weight_is_transposed = weight.dtype, w_encoded.layout == "col"
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.integer_gradients, ctx.activation = integer_gradients, activation
        return out.view(*x_encoded.data.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *operands, kept = ctx.saved_tensors
        saved = _Saved(*operands, ctx.weight_is_transposed)
        g = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        sums = None
        decoding = not ctx.integer_gradients and narrow_dtype(g.device) is torch.bfloat16
        if ctx.activation is not None:
            # A bias that was broadcast sums what has not been rounded.
            narrowed = decoding and (ctx.bias is None or ctx.bias[0] == g.shape[1:])
            dtype = torch.bfloat16 if narrowed else g.dtype
            g, sums = changed_and_summed(g, kept.view(g.shape), ctx.activation, dtype)
        if ctx.integer_gradients:
            dx, dw = _integer_gradients(g, saved, ctx.x[1])
        elif decoding:
            h, sums = narrow_and_sum(g) if g.dtype is torch.float32 else (g, sums)
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
                sums = g.float().sum_to_size(shape)
            db = (sum_columns(g) if sums is None else sums).to(dtype)
        return dx, dw, db, None, None, None, None, None


class _Saved(NamedTuple):
    """What a layer keeps for backward: x (M, K) for dW, W (N, K) for dx; None for a gradient nobody wants.

    Scales have one dimension: one per row of x, one per output.
    """

    x_codes: Tensor | None
    x_scale: Tensor | None
    w_codes: Tensor | None
    w_scale: Tensor | None
    weight_is_transposed: bool

    def weight_gradient(self, h: Tensor, x: Tensor) -> Tensor:
        """H' x, in the orientation in which the weight is stored."""
        return x.t() @ h if self.weight_is_transposed else h.t() @ x


def _decoded_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """Dx = g bf16(s_w W) and dW = g' bf16(s_x X), g in BF16.

    Error of both products with an FP32 g: 0.0029, against 0.0023 with the scales in g; INT8's own is 0.01.
    """
    dx = dw = None
    if saved.w_codes is not None:
        dx = g @ decode_rows(saved.w_codes, saved.w_scale)
    if saved.x_codes is not None:
        dw = saved.weight_gradient(g, decode_rows(saved.x_codes, saved.x_scale))
    return dx, dw


def _folded_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """Dx = narrow(g s_w) W and dW = narrow(g s_x)' X: the codes need no rounding."""
    dx = dw = None
    # Both scaled gradients go through one buffer: 0.5 ms less than two fresh ones of 6 MB, which are page
    # faults (Zen 5, one thread).
    scaled = torch.empty_like(g)
    if saved.w_codes is not None:
        h, back = to_narrow(torch.mul(g, saved.w_scale, out=scaled), 127.0 * g.shape[1])
        dx = _scaled_back(h @ saved.w_codes.to(h.dtype), back)
    if saved.x_codes is not None:
        h, back = to_narrow(torch.mul(g, saved.x_scale.unsqueeze(1), out=scaled), 127.0 * max(g.shape[0], 1))
        dw = _scaled_back(saved.weight_gradient(h, saved.x_codes.to(h.dtype)), back)
    return dx, dw


def _scaled_back(product: Tensor, back: Tensor | None) -> Tensor:
    return product if back is None else product.float().mul_(back)


def _integer_gradients(g: Tensor, saved: _Saved, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The same two products in INT8, dx in `dtype` and dW in FP32; each gradient is unbiased."""
    dx = dw = None
    if saved.w_codes is not None:
        codes, scale = round_rows(g, saved.w_scale)
        ones = scale.new_ones(saved.w_codes.shape[1])
        dx = dequantize(int8_sums(codes, saved.w_codes), scale, ones, None, dtype)
    if saved.x_codes is not None:
        codes, scale = round_columns(g, saved.x_scale)
        ones = scale.new_ones(saved.x_codes.shape[1])
        if saved.weight_is_transposed:
            sums = int8_sums(saved.x_codes.t(), codes)
            dw = dequantize(sums, ones, scale, None, torch.float32)
        else:
            sums = int8_sums(codes.t(), saved.x_codes)
            dw = dequantize(sums, scale, ones, None, torch.float32)
    return dx, dw

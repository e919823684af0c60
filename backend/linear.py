"""Linear layers in INT8: the forward product in INT8, the two backward products in 16 bits or in INT8 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsync.backend.encoding import Encoded, Operand, rounding_noise, stochastic_codes
from qsync.backend.products import int8_product, narrow_dtype, to_narrow
from qsync.errors import UnsupportedError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def linear_int8(
    target: Callable[..., Tensor], out_type: str, input: Operand, weight: Operand, bias: Tensor | None = None
) -> Tensor:
    """y = x W' + b with x and W in INT8, gradients through 16-bit products.

        y  = s_x s_w (X W') + b          X, W the INT8 codes; s_x per row, s_w per output          (ours)
        dx = narrow(g s_w) W,   dW = narrow(g s_x)' X,   db = sum g

    x (..., K) encoded "row", W (N, K) encoded "row", b (N) in FP32; the result (..., N) is in `out_type`.
    In the gradients the scales go to g, or back to X and W, whichever is cheaper. Saves the codes and scales
    only.

    >>> linear_int8(F.linear, "fp32", Operand(x, x8), Operand(w, w8), b)
    """
    return _apply(input, weight, bias, out_type, False)


def linear_int8_all(
    target: Callable[..., Tensor], out_type: str, input: Operand, weight: Operand, bias: Tensor | None = None
) -> Tensor:
    """`linear_int8` with INT8 gradient products as well, their gradient rounded stochastically.

        dx = s_h (H W),    H = stochastic INT8 of g s_w, one scale s_h per row                     (ours)
        dW = s_k (K' X),   K = stochastic INT8 of g s_x, one scale s_k per output

    >>> linear_int8_all(F.linear, "fp32", Operand(x, x8), Operand(w, w8))
    """
    return _apply(input, weight, bias, out_type, True)


def addmm_int8(
    target: Callable[..., Tensor],
    out_type: str,
    input: Tensor,
    mat1: Operand,
    mat2: Operand,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """`linear_int8` for addmm(b, x, W) with W stored (K, N) and encoded "col".

    Raises UnsupportedError for alpha other than 1, or beta other than 0 and 1.

    >>> addmm_int8(torch.addmm, "fp32", b, Operand(x, x8), Operand(w, encode(w, "int8_col")))
    """
    return _apply(mat1, mat2, _addmm_bias(input, beta, alpha), out_type, False)


def addmm_int8_all(
    target: Callable[..., Tensor],
    out_type: str,
    input: Tensor,
    mat1: Operand,
    mat2: Operand,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """`linear_int8_all` for addmm(b, x, W) with W stored (K, N) and encoded "col".

    >>> addmm_int8_all(torch.addmm, "fp32", b, Operand(x, x8), Operand(w, encode(w, "int8_col")))
    """
    return _apply(mat1, mat2, _addmm_bias(input, beta, alpha), out_type, True)


def _addmm_bias(bias: Tensor, beta: float, alpha: float) -> Tensor | None:
    if alpha != 1 or beta not in (0, 1):
        raise UnsupportedError(
            f"addmm with alpha={alpha} and beta={beta} has no INT8 kernel: keep it in FP32"
        )
    return bias if beta else None


def _apply(
    x: Operand, weight: Operand, bias: Tensor | None, out_type: str, integer_gradients: bool
) -> Tensor:
    return _Int8Product.apply(
        x.value, weight.value, bias, x.encoded, weight.encoded, DTYPES[out_type], integer_gradients
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
    ) -> Tensor:
        x_codes = x_encoded.data.reshape(-1, x_encoded.data.shape[-1])
        x_scale, w_scale = x_encoded.scale.reshape(-1, 1), w_encoded.scale.reshape(-1)
        out = int8_product(x_codes, w_encoded.data.t()).mul_(x_scale).mul_(w_scale)
        if bias is not None:
            out.add_(bias)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_codes, x_scale) if need_w else (None, None)),
            *((w_encoded.data, w_scale) if need_x else (None, None)),
        )
        ctx.x = (x.shape, x.dtype)
        ctx.weight_dtype, ctx.weight_is_transposed = weight.dtype, w_encoded.layout == "col"
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.integer_gradients = integer_gradients
        return out.view(*x_encoded.data.shape[:-1], out.shape[-1]).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors, ctx.weight_is_transposed)
        g = gradient.reshape(-1, gradient.shape[-1])
        if ctx.integer_gradients:
            dx, dw = _integer_gradients(g.float(), saved)
        elif _decoding_is_cheaper(g, ctx.x[0][-1]):
            dx, dw = _decoded_gradients(g, saved)
        else:
            dx, dw = _folded_gradients(g.float(), saved)
        if dx is not None:
            dx = dx.view(ctx.x[0]).to(ctx.x[1])
        if dw is not None:
            dw = dw.to(ctx.weight_dtype)
        db = g.float().sum_to_size(ctx.bias[0]).to(ctx.bias[1]) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None, None


class _Saved(NamedTuple):
    """What a layer keeps for backward: x (M, K) for dW, W (N, K) for dx; None for a gradient nobody wants."""

    x_codes: Tensor | None
    x_scale: Tensor | None
    w_codes: Tensor | None
    w_scale: Tensor | None
    weight_is_transposed: bool

    def weight_gradient(self, h: Tensor, x: Tensor) -> Tensor:
        """h' x, in the orientation in which the weight is stored."""
        return x.t() @ h if self.weight_is_transposed else h.t() @ x


def _decoding_is_cheaper(g: Tensor, inputs: int) -> bool:
    """Whether to bring x and w back to BF16 for the gradient products, or to fold their scales into g.

    Folding passes over g (M, N) twice more, decoding over x (M, K). One thread of a Zen 5, M = 1024, both
    products, ms for folding and decoding: BF16 g 8.7 and 7.0 at K, N = 384, 1536 (FP32 g: 8.9 and 7.9); 27
    and 30 at 3072, 768. Error of both products: 0.0023 with a BF16 g either way; with an FP32 g 0.0023
    folded, 0.0029 decoded; INT8's own is 0.01. FP16 has not the range for decoded values, but for codes it
    has.
    """
    return narrow_dtype(g.device) is torch.bfloat16 and g.shape[1] >= inputs


def _decoded_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """dx = bf16(g) bf16(s_w W) and dW = bf16(g)' bf16(s_x X)."""
    h = g.bfloat16()
    dx = dw = None
    if saved.w_codes is not None:
        dx = h @ saved.w_codes.float().mul_(saved.w_scale.view(-1, 1)).bfloat16()
    if saved.x_codes is not None:
        dw = saved.weight_gradient(h, saved.x_codes.float().mul_(saved.x_scale).bfloat16())
    return dx, dw


def _folded_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """dx = narrow(g s_w) W and dW = narrow(g s_x)' X: the codes need no rounding."""
    dx = dw = None
    # Both scaled gradients go through one buffer: 0.5 ms less than two fresh ones of 6 MB, which are page
    # faults (Zen 5, one thread).
    scaled = torch.empty_like(g)
    if saved.w_codes is not None:
        h, back = to_narrow(torch.mul(g, saved.w_scale, out=scaled), 127.0 * g.shape[1])
        dx = _scaled_back(h @ saved.w_codes.to(h.dtype), back)
    if saved.x_codes is not None:
        h, back = to_narrow(torch.mul(g, saved.x_scale, out=scaled), 127.0 * max(g.shape[0], 1))
        dw = _scaled_back(saved.weight_gradient(h, saved.x_codes.to(h.dtype)), back)
    return dx, dw


def _scaled_back(product: Tensor, back: Tensor | None) -> Tensor:
    return product if back is None else product.float().mul_(back)


def _integer_gradients(g: Tensor, saved: _Saved) -> tuple[Tensor | None, Tensor | None]:
    """The same two products in INT8. Both roundings use the same noise; each gradient is unbiased."""
    noise, scaled = rounding_noise(g.shape, g.device), torch.empty_like(g)
    dx = dw = None
    if saved.w_codes is not None:
        codes, scale = stochastic_codes(torch.mul(g, saved.w_scale, out=scaled), (1,), noise)
        dx = int8_product(codes, saved.w_codes).mul_(scale)
    if saved.x_codes is not None:
        codes, scale = stochastic_codes(torch.mul(g, saved.x_scale, out=scaled), (0,), noise)
        if saved.weight_is_transposed:
            dw = int8_product(saved.x_codes.t(), codes).mul_(scale)
        else:
            dw = int8_product(codes.t(), saved.x_codes).mul_(scale.t())
    return dx, dw

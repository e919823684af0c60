"""Reference kernels: every precision in plain torch, to test fast kernels against.

    y = target(x~, w~, ...) + b        x~, w~: the operands as decoded, in FP32

The gradient passes straight through the rounding of the operands: dx = J'(g~) at x~, w~, where g~ is the
gradient rounded to the precision before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import LARGEST_CODE, scales
from qsync.backend.casts.epilogues import Activation
from qsync.backend.encoding import Encoded, Operand, block_codes, decode, decode_blocks, encode
from qsync.backend.kernels.convolution.conv_strategy import int8_gradient_unfolds
from qsync.backend.kernels.linear import DTYPES
from qsync.errors import UnsupportedError
from qsync.operators.precision import MANTISSA_BITS, Precision
from qsync.operators.registry import PRECISIONS_BY_KIND, PRODUCTS

Kernel = Callable[..., Tensor]


def reference_kernel(kind: str, precision: Precision) -> Kernel | None:
    """Return the plain kernel of this kind of product in this precision; None if there is none.

    It is called like every kernel: kernel(target, out_type, *args, **kwargs), with `Operand`s for encoded
    operands. A linear layer takes an optional `activation`, which is applied to the result in the
    result's type.

    >>> reference_kernel("linear", Precision.INT8)(F.linear, "fp32", Operand(x, x8), Operand(w, w8), bias)
    """
    if precision not in PRECISIONS_BY_KIND.get(kind, ()):
        return None
    if kind == "conv2d" and precision is Precision.INT8_ALL:
        return _int8_convolution
    if precision is Precision.MXFP8:
        return block_scaled(kind)
    if precision in (Precision.FP8, Precision.INT8_ALL):
        return _eight_bit_gradients(kind, precision)
    bits = None if precision is Precision.FP32 else MANTISSA_BITS[precision.facts.gradient]

    def kernel(
        target: Kernel, out_type: str, *args: Any, activation: Activation | None = None, **kwargs: Any
    ) -> Tensor:
        args, kwargs = tree_map(
            lambda leaf: _differentiable(leaf, precision),
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, Operand),
        )
        y = target(*args, **kwargs)
        if kind == "embedding" and precision is Precision.INT8:  # the looked-up rows are encoded
            y = differentiable(_StraightThrough, y, decode(encode(y, "int8_row")))
        y = differentiable(_RoundGradient, y, bits).to(DTYPES[out_type])
        return y if activation is None else activation(y)

    return kernel


def round_mantissa(values: Tensor, bits: int) -> Tensor:
    """Round FP32 values to `bits` explicit mantissa bits, ties to even.

    The step is 2^(floor(log2 |x|) - bits).

    >>> round_mantissa(torch.tensor([1.01, 1.49]), 1)
    tensor([1.0000, 1.5000])
    """
    drop = 23 - bits
    codes = values.contiguous().view(torch.int32)
    odd = codes.bitwise_right_shift(drop).bitwise_and_(1)
    rounded = odd.add_(codes).add_((1 << (drop - 1)) - 1).bitwise_and_(-(1 << drop)).view(torch.float32)
    return torch.where(values.isnan(), values, rounded)  # infinity has no bits to round


def _differentiable(leaf: Any, precision: Precision) -> Any:
    """Return an argument in FP32, rounded, whose gradient goes to the original value."""
    if isinstance(leaf, Operand):
        return differentiable(_StraightThrough, leaf.value, decode(leaf.encoded))
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        if precision in (Precision.TF32, Precision.BF16):
            return differentiable(
                _StraightThrough,
                leaf,
                round_mantissa(leaf.detach().float(), precision.facts.bits),
            )
        return leaf.float()
    return leaf


class _StraightThrough(torch.autograd.Function):
    """Return the decoded operand; pass the gradient to the original value unchanged."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, decoded: Tensor) -> Tensor:
        ctx.dtype = value.dtype
        return decoded.view_as(decoded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _RoundGradient(torch.autograd.Function):
    """Return y unchanged; round its gradient to the precision's mantissa.

    FP16's exponent needs no rounding: the gradient is scaled.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bits: int | None) -> Tensor:
        ctx.bits = bits
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient if ctx.bits is None else round_mantissa(gradient, ctx.bits)), None


def _eight_bit_gradients(kind: str, precision: Precision) -> Kernel:
    """Return a linear layer whose products take 8-bit gradients, with one scale per row."""
    first = PRODUCTS[kind].factors[0]

    def kernel(
        target: Kernel, out_type: str, *args: Any, activation: Activation | None = None, **kwargs: Any
    ) -> Tensor:
        x, weight = args[first], args[first + 1]
        rest = args[:first] + args[first + 2 :]
        bias = rest[0] if rest else kwargs.get("bias")
        stored = decode(weight.encoded)
        matrix = stored.t() if weight.encoded.layout == "col" else stored
        product = differentiable(
            _EightBitProduct,
            differentiable(_StraightThrough, x.value, decode(x.encoded)),
            differentiable(
                _StraightThrough, weight.value.t() if weight.encoded.layout == "col" else weight.value, matrix
            ),
            x.encoded.scale,
            weight.encoded.scale,
            precision,
        )
        y = (product if bias is None else product + bias).to(DTYPES[out_type])
        return y if activation is None else activation(y)

    return kernel


class _EightBitProduct(torch.autograd.Function):
    """y = x W';  dx = q_row(g s_w) (W / s_w),  dW = q_column(g s_x)' (x / s_x). q: INT8 or E5M2."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor, precision: Precision
    ) -> Tensor:
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.precision = precision
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_scale, w_scale = ctx.saved_tensors
        rounded = _stochastic_int8 if ctx.precision is Precision.INT8_ALL else _nearest_e5m2
        dx = rounded(gradient * w_scale.t()[0], -1) @ (weight / w_scale)
        g, codes = (t.reshape(-1, t.shape[-1]) for t in (gradient * x_scale, x / x_scale))
        dw = rounded(g, 0).t() @ codes
        return dx, dw, None, None, None


def block_scaled(kind: str) -> Kernel:
    """Return a product in MXFP8, emulated: operands are decoded to FP32 and multiplied there.

        y = x~ w~' + b,   dx = q(g) q(w~),   dW = q(g)' q(x~)

    q rounds to blocks along the dimension that the product sums over, as hardware needs it: g by outputs for
    dx, by rows for dW. x~ and w~ were encoded along their inner dimension, and saved so. Rounding them once
    more along the other one changes 0.3 % of Gaussian values, those that are subnormal or above 448 there:
    scales are powers of two, so E4M3's significands stay.
    """
    names = next(iter(PRODUCTS[kind].calls.values()))
    factors = [names[factor] for factor in PRODUCTS[kind].factors]
    added = next((name for name in names if name not in factors), None)

    def kernel(target: Kernel, out_type: str, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        left, right = (given[name] for name in factors)
        alpha, beta = given.get("alpha", 1), given.get("beta", 1)
        if alpha != 1 or beta not in (0, 1):
            raise UnsupportedError(
                f"addmm with alpha={alpha} and beta={beta} has no MXFP8 kernel: keep it in FP32"
            )
        y = differentiable(_BlockProduct, left.value, right.value, left.encoded, right.encoded)
        bias = given.get(added) if added and beta else None
        return (y if bias is None else y.add_(bias)).to(DTYPES[out_type])

    return kernel


class _BlockProduct(torch.autograd.Function):
    """y = x~ w~' of (..., M, K) and (..., N, K), whose batches broadcast; saves codes and scales only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, x_encoded: Encoded, w_encoded: Encoded) -> Tensor:
        left, right = _by_rows(x_encoded), _by_rows(w_encoded)
        y = decode_blocks(*left, -1) @ decode_blocks(*right, -1).mT
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(*(left if need_w else (None, None)), *(right if need_x else (None, None)))
        ctx.x, ctx.weight = (x.shape, x.dtype, left[0].shape), (weight.shape, weight.dtype, right[0].shape)
        ctx.matrices, ctx.is_turned = y.shape, w_encoded.layout != "row" and weight.ndim > 1
        shape = [*y.shape[:-2], *y.shape[-2:-1][: x.ndim - 1], *y.shape[-1:][: weight.ndim - 1]]
        return owned(y.view(shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        g = gradient.reshape(ctx.matrices).float()
        dx = dw = None
        if w_codes is not None:
            shape, dtype, matrices = ctx.x
            dx = _along(g, -1) @ _along(decode_blocks(w_codes, w_scale, -1), -2)
            dx = dx.sum_to_size(matrices).view(shape).to(dtype)
        if x_codes is not None:
            shape, dtype, matrices = ctx.weight
            if len(matrices) == 2:  # one product sums over the rows of all matrices
                x_codes, x_scale, g = (t.flatten(0, -2) for t in (x_codes, x_scale, g))
            dw = _along(g, -2).mT @ _along(decode_blocks(x_codes, x_scale, -1), -2)
            dw = dw.sum_to_size(matrices)
            dw = (dw.mT if ctx.is_turned else dw.view(shape)).to(dtype)
        return dx, dw, None, None


def _by_rows(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Return codes and scales of matrices whose last dimension is summed; a vector is one row."""
    codes, scale = encoded.data, encoded.code_scale
    if codes.ndim == 1:
        return codes.unsqueeze(0), scale.unsqueeze(0)
    return (codes.mT, scale.mT) if encoded.layout == "inner" else (codes, scale)


def _along(values: Tensor, dim: int) -> Tensor:
    """Round to blocks along a dimension."""
    return decode_blocks(*block_codes(values, dim), dim)


def _int8_convolution(
    target: Kernel,
    out_type: str,
    input: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve images; the products of backward take INT8 gradients."""
    x, w = (differentiable(_StraightThrough, o.value, decode(o.encoded)) for o in (input, weight))
    options = (None, stride, padding, dilation, groups)
    scales_of = (input.encoded.scale, weight.encoded.scale)
    y = differentiable(_Int8Convolution, x, w, *scales_of, target, options)
    return (y if bias is None else y + bias.view(-1, 1, 1)).to(DTYPES[out_type])


class _Int8Convolution(torch.autograd.Function):
    """y = x * w;  dx = J_x'(q(g s_w)) at w / s_w,  dW = J_w'(q_channel(g s_x)) at x / s_x.

    The scales of q(g s_w) are those of `int8_gradient_unfolds`: one per image, or one per pixel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x_scale: Tensor,
        w_scale: Tensor,
        target: Kernel,
        options: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.target, ctx.options = target, options
        return target(x, weight, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_scale, w_scale = ctx.saved_tensors
        unfolds = ctx.options[1] in (1, (1, 1)) and int8_gradient_unfolds(
            x.shape, weight.shape, gradient.shape
        )
        h = _stochastic_int8(gradient * w_scale.view(-1, 1, 1), (1, 2, 3) if unfolds else 1)
        k = _stochastic_int8(gradient * x_scale, (0, 2, 3))
        with torch.enable_grad():
            codes = [t.detach().requires_grad_() for t in (x / x_scale, weight / w_scale)]
            y = ctx.target(*codes, *ctx.options)
        (dx,) = torch.autograd.grad(y, codes[:1], h, retain_graph=True)
        (dw,) = torch.autograd.grad(y, codes[1:], k)
        return dx, dw, None, None, None, None


def _stochastic_int8(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    dims = dims if isinstance(dims, tuple) else (dims,)
    scale, _ = scales(values, dims, LARGEST_CODE["int8"])
    return torch.floor(values / scale + torch.rand_like(values)) * scale


def _nearest_e5m2(values: Tensor, dim: int) -> Tensor:
    scale, _ = scales(values, (dim,), LARGEST_CODE["fp8_gradient"])
    return (values / scale).to(torch.float8_e5m2).float() * scale

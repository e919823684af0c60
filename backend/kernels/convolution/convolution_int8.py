"""INT8 convolutions on CPUs: products of unfolded windows, or oneDNN (FP32 where its sums saturate).

The shape decides. Images and weights are converted to channels-last order. The result stays in that order for
the next operators (`Run.channels_last`). The input's gradient returns in the input's own order: the operator
before is several times slower if its gradient and saved tensors differ in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import (
    decode_rows,
    fold,
    round_columns,
    round_rows,
    scale_images,
    sum_columns,
    to_bf16_and_sum,
    transpose_last,
    unfold,
)
from qsync.backend.devices.onednn import sums_int8_exactly
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.int8_products import scaled_product
from qsync.backend.kernels.convolution.conv_geometry import Geometry, geometry_of, single
from qsync.backend.kernels.convolution.conv_products import (
    multiplies_windows,
    onednn_gradients,
    pixels_of,
    weight_rows,
    window_gradients,
    windows_of,
)
from qsync.backend.kernels.convolution.conv_strategy import int8_gradient_unfolds, int8_windows_pay
from qsync.backend.kernels.convolution.image_order import (
    channels_first,
    is_channels_first,
)
from qsync.backend.kernels.linear import DTYPES
from qsync.errors import UnsupportedError


class _Call(NamedTuple):
    """Options of an INT8 convolution without its differentiable tensors; `dtype` is the result's."""

    x: Encoded
    weight: Encoded
    dtype: torch.dtype
    geometry: Geometry
    integer_gradients: bool


def conv2d_int8(
    target: Callable[..., Tensor],
    out_type: str,
    input: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve in INT8, y = conv(x, W) + b; compute gradients by BF16 convolutions.

        y  = s_x[n] s_w[c] conv(X, W) + b[c]       X, W the INT8 codes, one scale per image and output channel
        dx = conv_x(bf16(g), bf16(s_w W)),   dW = conv_w(bf16(g), bf16(s_x X)),   db = sum g

    x (n, C, h, w) encoded "image", W (c, C / groups, kh, kw) encoded "channel"; the result lies in
    channels-last order. Saves the codes and scales only. Raises UnsupportedError for an input without a batch
    dimension.

    >>> conv2d_int8(torch.conv2d, "fp32", Operand(x, x8), Operand(w, w8), padding=1)
    """
    if input.value.ndim != 4:
        raise UnsupportedError(
            "conv2d in INT8 needs a batched input (n, C, h, w): add a batch dimension of 1"
        )
    geometry = geometry_of(weight.value, stride, padding, dilation, groups)
    return _int8_convolution(input, weight, bias, DTYPES[out_type], geometry)


def conv2d_int8_all(
    target: Callable[..., Tensor],
    out_type: str,
    input: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve with INT8 products forward and backward, gradients rounded stochastically.

        dx = s_h unfold(H) W'  or  fold(s_h H W),    H = stochastic INT8 of g s_w, one scale s_h per image or
                                                     pixel: see `int8_gradient_unfolds`
        dW = s_k (K' unfold(X)),                     K = stochastic INT8 of g s_x, one scale s_k per output

    Raises UnsupportedError for an input without a batch dimension, and for groups.

    >>> conv2d_int8_all(torch.conv2d, "fp32", Operand(x, x8), Operand(w, w8), padding=1)
    """
    if input.value.ndim != 4 or groups > 1:
        raise UnsupportedError(
            "conv2d in int8_all needs a batched input (n, C, h, w) and one group: run it in int8"
        )
    geometry = geometry_of(weight.value, stride, padding, dilation, groups)
    return _int8_convolution(input, weight, bias, DTYPES[out_type], geometry, integer_gradients=True)


def conv1d_int8(
    target: Callable[..., Tensor],
    out_type: str,
    input: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve signals (n, C, length) with W (c, C / groups, k) in INT8.

    Signals run as images of height 1 through `conv2d_int8`.

    >>> conv1d_int8(torch.conv1d, "fp32", Operand(x, x8), Operand(w, w8), padding=1)
    """
    if input.value.ndim != 3:
        raise UnsupportedError(
            "conv1d in INT8 needs a batched input (n, C, length): add a batch dimension of 1"
        )
    geometry = geometry_of(
        weight.value.unsqueeze(2),
        (1, *single(stride)),
        padding if isinstance(padding, str) else (0, *single(padding)),
        (1, *single(dilation)),
        groups,
    )
    image, filters = (_with_height(operand) for operand in (input, weight))
    return _int8_convolution(image, filters, bias, DTYPES[out_type], geometry).squeeze(2)


def _int8_convolution(
    image: Operand,
    filters: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    geometry: Geometry,
    integer_gradients: bool = False,
) -> Tensor:
    call = _Call(image.encoded, filters.encoded, dtype, geometry, integer_gradients)
    return differentiable(_Int8Convolution, image.value, filters.value, bias, call)


def _with_height(operand: Operand) -> Operand:
    """Return a signal as an image of height 1."""
    encoded = operand.encoded
    flat = Encoded(encoded.data.unsqueeze(2), encoded.code_scale.unsqueeze(2), encoded.layout)
    flat.packed = encoded.packed
    return Operand(operand.value.unsqueeze(2), flat)


class _Int8Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        geometry, x_codes = call.geometry, call.x.data
        if any(geometry.extra):
            x_codes = torch.nn.functional.pad(
                x_codes, (0, geometry.extra[0], 0, geometry.extra[1]), value=128
            )
        x_codes = x_codes.contiguous(memory_format=torch.channels_last)
        x_scale = call.x.code_scale.reshape(-1)
        pixels = pixels_of(x_codes.shape, weight.shape, geometry)
        windows_pay = int8_windows_pay(pixels, weight.shape, geometry.groups)
        out = (_unfolded if windows_pay else _convolved)(
            x_codes, x_scale, call.weight, bias, call.dtype, geometry
        )
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_codes, x_scale) if need_w else (None, None)),
            *((call.weight.data, call.weight.code_scale.reshape(-1)) if need_x else (None, None)),
        )
        ctx.x, ctx.padded_shape = (x.shape, x.dtype, is_channels_first(x)), x_codes.shape
        ctx.weight = (weight.shape, weight.dtype, weight.is_contiguous())
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.geometry, ctx.integer_gradients = geometry, call.integer_gradients
        return owned(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        shapes = (ctx.padded_shape, ctx.weight[0])
        need_b = ctx.needs_input_grad[2]
        if ctx.integer_gradients:
            pixels = gradient.permute(0, 2, 3, 1).contiguous()
            dx = _integer_input_gradient(pixels, w_codes, w_scale, *shapes, ctx.geometry, ctx.x[1])
            dw = _integer_weight_gradient(pixels, x_codes, x_scale, shapes[1], ctx.geometry)
            sums = sum_columns(pixels.flatten(0, 2)) if need_b else None
        else:
            g, sums = _images_to_bf16(gradient)
            x = None if x_codes is None else _decoded(x_codes, x_scale)
            weight = None if w_codes is None else _decoded(w_codes, w_scale)
            gradients = window_gradients if multiplies_windows(*shapes, ctx.geometry) else onednn_gradients
            dx, dw = gradients(g, x, weight, *shapes, ctx.geometry)
        if dx is not None:
            dx = dx[:, :, : ctx.x[0][2], : ctx.x[0][3]].to(ctx.x[1])
            dx = channels_first(dx) if ctx.x[2] else dx
        if dw is not None:
            dw = _weight_gradient(dw, *ctx.weight[1:])
        return dx, dw, sums.to(ctx.bias_dtype) if need_b and sums is not None else None, None


def _integer_input_gradient(
    g: Tensor,
    codes: Tensor | None,
    scale: Tensor,
    x_shape: torch.Size,
    w_shape: torch.Size,
    geometry: Geometry,
    dtype: torch.dtype,
) -> Tensor | None:
    """Compute dx (n, C, h, w) in INT8 from g (n, p, q, c) and a weight's codes, channels-last."""
    if codes is None:
        return None
    n, p, q, outputs = g.shape
    (channels, *kernel), size = w_shape[1:], (x_shape[2], x_shape[3])
    ones = scale.new_ones(channels)
    if max(geometry.stride) == 1 and int8_gradient_unfolds(x_shape, w_shape, (n, outputs, p, q)):
        h, s_h = round_rows(g.view(n, p * q * outputs), scale.repeat(p * q))
        around = [
            d * (k - 1) - pad for d, k, pad in zip(geometry.dilation, kernel, geometry.padding, strict=True)
        ]
        windows = unfold(h.view(g.shape), (kernel[0], kernel[1]), [1, 1], around, geometry.dilation)
        turned = codes.flip(2, 3).permute(2, 3, 0, 1).reshape(math.prod(kernel) * outputs, channels)
        per_pixel = s_h.repeat_interleave(math.prod(size))
        dx = scaled_product(windows.flatten(3).flatten(0, 2), turned, per_pixel, ones, None, dtype)
        return dx.view(n, *size, channels).permute(0, 3, 1, 2)
    h, s_h = round_rows(g.view(n * p * q, outputs), scale)
    if math.prod(kernel) == 1 and max(geometry.stride) == 1 and max(geometry.padding) == 0:
        dx = scaled_product(h, weight_rows(codes), s_h, ones, None, dtype)
        return dx.view(n, p, q, channels).permute(0, 3, 1, 2)
    windows = scaled_product(h, weight_rows(codes), s_h, ones.repeat(math.prod(kernel)), None, torch.bfloat16)
    options = (geometry.stride, geometry.padding, geometry.dilation)
    return fold(windows.view(n, p, q, *kernel, channels), size, *options).permute(0, 3, 1, 2)


def _integer_weight_gradient(
    g: Tensor,
    codes: Tensor | None,
    scale: Tensor,
    w_shape: torch.Size,
    geometry: Geometry,
) -> Tensor | None:
    """Compute dW (c, C, kh, kw) in FP32 by an INT8 product from g (n, p, q, c) and an input's codes."""
    if codes is None:
        return None
    pixels = math.prod(g.shape[1:3])
    k, s_k = round_columns(g.flatten(0, 2), scale.repeat_interleave(pixels))
    windows = windows_of(codes, w_shape, geometry).flatten(3).flatten(0, 2)
    dw = scaled_product(k.t(), windows, s_k, scale.new_ones(windows.shape[1]), None, torch.float32)
    return dw.view(len(dw), *w_shape[2:], w_shape[1]).permute(0, 3, 1, 2)


def _unfolded(
    x_codes: Tensor,
    x_scale: Tensor,
    weight: Encoded,
    bias: Tensor | None,
    dtype: torch.dtype,
    geometry: Geometry,
) -> Tensor:
    """Convolve by one product: windows (pixels, kh kw C) times the weight's rows."""
    windows = windows_of(x_codes, weight.data.shape, geometry)
    n, p, q = windows.shape[:3]
    outputs = len(weight.data)
    rows, per_pixel = windows.flatten(3).flatten(0, 2), x_scale.repeat_interleave(p * q)
    w_scale = weight.code_scale.reshape(-1)
    out = scaled_product(rows, weight_rows(weight.data).t(), per_pixel, w_scale, bias, dtype)
    return out.view(n, p, q, outputs).permute(0, 3, 1, 2)


def _convolved(
    x_codes: Tensor,
    x_scale: Tensor,
    weight: Encoded,
    bias: Tensor | None,
    dtype: torch.dtype,
    geometry: Geometry,
) -> Tensor:
    """Convolve codes by oneDNN if its sums are exact, else by torch in FP32; scale sums per image."""
    sums = (_sums_of_onednn if sums_int8_exactly() else _sums_in_fp32)(x_codes, weight, geometry)
    return scale_images(sums, x_scale, bias, dtype)


def _sums_of_onednn(x_codes: Tensor, weight: Encoded, geometry: Geometry) -> Tensor:
    """Return oneDNN's sums (n, c, p, q) for activations with zero point 128, times the weight's scale."""
    shape = tuple(x_codes.shape)
    key = ("qconv", shape, geometry.groups, *geometry.stride, *geometry.padding, *geometry.dilation)
    arguments = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    if key not in weight.packed:
        scale = weight.code_scale.reshape(-1)
        # oneDNN packs slower with a scale per channel, to the same result: 0.48 ms, 0.06 with one, for 960
        # channels.
        prepacked = torch.ops.onednn.qconv_prepack(weight.data, scale[:1], 1.0, 128, *arguments, list(shape))
        weight.packed[key] = (prepacked, scale, torch.zeros_like(scale, dtype=torch.int64))
    sums: Tensor = torch.ops.onednn.qconv_pointwise(
        x_codes, 1.0, 128, *weight.packed[key], None, *arguments, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


def _sums_in_fp32(x_codes: Tensor, weight: Encoded, geometry: Geometry) -> Tensor:
    """Return a convolution's INT8 sums computed in FP32, which is exact up to 2^24."""
    sums = torch.conv2d(x_codes.float().sub_(128), weight.data.float(), None, *geometry[:4])
    return sums.mul_(weight.code_scale.reshape(-1, 1, 1))


def _images_to_bf16(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return g (n, C, h, w) in BF16, channels-last, and the FP32 sums of its channels (C)."""
    flat = g.permute(0, 2, 3, 1).contiguous()
    rounded, sums = to_bf16_and_sum(flat.view(math.prod(flat.shape[:-1]), flat.shape[-1]))
    return rounded.view(flat.shape).permute(0, 3, 1, 2), sums


def _decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode channels-last codes (n, C, h, w) with one scale per first index, to BF16."""
    flat = codes.permute(0, 2, 3, 1)
    decoded = decode_rows(flat.reshape(len(flat), math.prod(flat.shape[1:])), scale)
    return decoded.view(flat.shape).permute(0, 3, 1, 2)


def _weight_gradient(gradient: Tensor, dtype: torch.dtype, contiguous: bool) -> Tensor:
    """Return a weight's gradient (c, C, kh, kw) in `dtype`, contiguous if the weight is.

    DDP requires the gradient to have the parameter's strides on every rank.
    """
    last = gradient.permute(0, 2, 3, 1)
    if contiguous and gradient.is_contiguous():  # with one channel it may have either order's strides
        return gradient.to(dtype).flatten().view(gradient.shape)
    if not contiguous or not last.is_contiguous():
        return gradient.to(dtype)
    shape = (len(last), math.prod(last.shape[1:3]), last.shape[3])
    return transpose_last(last.view(shape), dtype).view(gradient.shape)

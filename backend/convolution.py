"""Two-dimensional convolution in INT8 on CPUs, through oneDNN; the backward pass in BF16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsync.backend.encoding import Encoded, Operand
from qsync.backend.linear import DTYPES
from qsync.errors import UnsupportedError


class _Geometry(NamedTuple):
    """A convolution's hyperparameters; `extra`: what "same" padding adds after (width, height)."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    extra: tuple[int, int]


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
    """y = conv(x, W) + b with x and W in INT8, gradients through BF16 convolutions.

        y  = s_x[n] s_w[c] conv(X, W) + b[c]       X, W the INT8 codes, one scale per image and output channel
        dx = conv_t(narrow(g s_w), W),   dW = conv_w(narrow(g s_x), X),   db = sum g          (ours)

    x (n, C, h, w) and W (c, C / groups, kh, kw), both encoded "sample"; the result has the memory format of
    an FP32 convolution's. Saves the codes and scales only. Raises UnsupportedError for an input without a
    batch dimension.

    >>> conv2d_int8(torch.conv2d, "fp32", Operand(x, x8), Operand(w, w8), padding=1)
    """
    if input.value.ndim != 4:
        raise UnsupportedError(
            "conv2d in INT8 needs a batched input (n, C, h, w): add a batch dimension of 1"
        )
    geometry = _geometry(weight.value, stride, padding, dilation, groups)
    return _Int8Convolution.apply(
        input.value, weight.value, bias, input.encoded, weight.encoded, DTYPES[out_type], geometry
    )


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else [int(v) for v in value] * (2 // len(value))


def _geometry(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> _Geometry:
    dilation = _pair(dilation)
    extra = (0, 0)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding, extra = tuple(t // 2 for t in total), (total[1] % 2, total[0] % 2)
    return _Geometry(_pair(stride), _pair(padding), dilation, groups, extra)


class _Int8Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_encoded: Encoded,
        w_encoded: Encoded,
        dtype: torch.dtype,
        geometry: _Geometry,
    ) -> Tensor:
        # oneDNN convolves channels-last whatever it is given. Bringing the codes into that order here costs
        # 0.7 ms (16x64x32x32), the product then takes 1.4 in place of 2.3 ms and backward finds its operand
        # in order.
        channels_last = _is_channels_last(x_encoded.data, w_encoded.data)
        x_codes = x_encoded.data.contiguous(memory_format=torch.channels_last)
        if any(geometry.extra):
            x_codes = torch.nn.functional.pad(x_codes, (0, geometry.extra[0], 0, geometry.extra[1]))
        out = _integer_convolution(x_codes, w_encoded, geometry)
        if not channels_last:
            out = out.contiguous()
        out.mul_(x_encoded.scale)
        if bias is not None:
            out.add_(bias.view(-1, 1, 1))
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            x_codes if need_w else None,
            x_encoded.scale if need_w else None,
            w_encoded.data if need_x else None,
            w_encoded.scale if need_x else None,
        )
        ctx.x, ctx.weight = (x.shape, x.dtype), (weight.shape, weight.dtype)
        ctx.padded_shape = x_codes.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.geometry = geometry
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        g = gradient.float()
        dx = dw = db = None
        if w_codes is not None:
            narrow = (g * w_scale.view(-1, 1, 1)).bfloat16()
            placeholder = narrow.new_empty(()).expand(ctx.padded_shape)
            dx = _convolution_backward(narrow, placeholder, w_codes.bfloat16(), ctx.geometry, 0)
            dx = dx[:, :, : ctx.x[0][2], : ctx.x[0][3]].to(ctx.x[1])
        if x_codes is not None:
            narrow = (g * x_scale).bfloat16()
            placeholder = narrow.new_empty(()).expand(ctx.weight[0])
            dw = _convolution_backward(narrow, x_codes.bfloat16(), placeholder, ctx.geometry, 1)
            dw = dw.to(ctx.weight[1])
        if ctx.needs_input_grad[2]:
            db = g.sum((0, 2, 3)).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether an FP32 convolution of these would return channels-last."""
    return any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, weight)
    )


def _integer_convolution(x_codes: Tensor, weight: Encoded, geometry: _Geometry) -> Tensor:
    """s_w conv(X, W) in FP32, channels-last. oneDNN takes unsigned activations: X has zero point 128."""
    shape = tuple(x_codes.shape)
    key = ("qconv", shape, geometry.groups, *geometry.stride, *geometry.padding, *geometry.dilation)
    place = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    if key not in weight.packed:
        scale = weight.scale.reshape(-1)
        # Packing takes as long as half the product for 256 channels: once per optimizer step.
        prepacked = torch.ops.onednn.qconv_prepack(weight.data, scale, 1.0, 128, *place, list(shape))
        weight.packed[key] = (prepacked, scale, torch.zeros_like(scale, dtype=torch.int64))
    unsigned = x_codes.view(torch.uint8).bitwise_xor(128)
    return torch.ops.onednn.qconv_pointwise(
        unsigned, 1.0, 128, *weight.packed[key], None, *place, 1.0, 0, torch.float32, "none", [], ""
    )


def _convolution_backward(g: Tensor, x: Tensor, weight: Tensor, geometry: _Geometry, wanted: int) -> Tensor:
    place = (geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], geometry.groups)
    mask = [wanted == 0, wanted == 1, False]
    return torch.ops.aten.convolution_backward(g, x, weight, None, *place, mask)[wanted]

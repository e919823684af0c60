"""Two-dimensional convolution in INT8 on CPUs, through oneDNN; the backward pass in BF16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsync.backend.casts import decode_rows, narrow_and_sum, scale_images
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
        dx = conv_x(bf16(g), bf16(s_w W)),   dW = conv_w(bf16(g), bf16(s_x X)),   db = sum g          (ours)

    x (n, C, h, w) encoded "image", W (c, C / groups, kh, kw) encoded "channel"; the result has the memory
    format of an FP32 convolution's. Saves the codes and scales only. Raises UnsupportedError for an input
    without a batch dimension.

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
        x_codes = x_encoded.data
        if any(geometry.extra):
            x_codes = torch.nn.functional.pad(
                x_codes, (0, geometry.extra[0], 0, geometry.extra[1]), value=128
            )
            x_codes = x_codes.contiguous(memory_format=torch.channels_last)
        sums = _integer_convolution(x_codes, w_encoded, geometry)
        out = scale_images(sums, x_encoded.scale.reshape(-1), bias, dtype)
        # oneDNN returns channels-last. A contiguous model must get contiguous results: it may call `view` on
        # them.
        if not _is_channels_last(x, weight):
            out = out.contiguous()
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_codes, x_encoded.scale) if need_w else (None, None)),
            *((w_encoded.data, w_encoded.scale) if need_x else (None, None)),
        )
        ctx.x, ctx.weight, ctx.padded_shape = (x.shape, x.dtype), (weight.shape, weight.dtype), x_codes.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.geometry = geometry
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        narrow, sums = _narrow_images(gradient)
        # One call with decoded operands: folding the scales into g takes two calls, and both reorder their
        # operands (7.2 against 6.8 ms for 16x64x32x32, 22.6 against 24.0 for 16x256x16x16, without the passes
        # over g; Zen 5).
        x = weight = narrow.new_zeros(())  # expanded below where it is only asked for its shape
        if x_codes is not None:
            flat = x_codes.permute(0, 2, 3, 1)
            x = (
                decode_rows(flat.reshape(len(flat), math.prod(flat.shape[1:])), x_scale.reshape(-1))
                .view(flat.shape)
                .permute(0, 3, 1, 2)
            )
        if w_codes is not None:
            weight = decode_rows(
                w_codes.reshape(len(w_codes), math.prod(w_codes.shape[1:])), w_scale.reshape(-1)
            ).view(ctx.weight[0])
        place = (ctx.geometry.stride, ctx.geometry.padding, ctx.geometry.dilation, False, [0, 0])
        wanted = [w_codes is not None, x_codes is not None, False]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            narrow,
            x.expand(ctx.padded_shape),
            weight.expand(ctx.weight[0]),
            None,
            *place,
            ctx.geometry.groups,
            wanted,
        )
        if dx is not None:
            dx = dx[:, :, : ctx.x[0][2], : ctx.x[0][3]].to(ctx.x[1])
        if dw is not None:
            dw = dw.to(ctx.weight[1])
        db = sums.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None, None


def _narrow_images(g: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 of g (n, C, h, w) in channels-last, and the FP32 sums of its channels (C)."""
    flat = g.permute(0, 2, 3, 1).contiguous()
    narrow, sums = narrow_and_sum(flat.view(math.prod(flat.shape[:-1]), flat.shape[-1]))
    return narrow.view(flat.shape).permute(0, 3, 1, 2), sums


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
    return torch.ops.onednn.qconv_pointwise(
        x_codes, 1.0, 128, *weight.packed[key], None, *place, 1.0, 0, torch.float32, "none", [], ""
    )

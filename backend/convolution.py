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
        dx = conv_x(bf16(g), bf16(s_w W)),   dW = conv_w(bf16(g), bf16(s_x X)),   db = sum g          (ours)

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
        x_codes = x_encoded.data
        if any(geometry.extra):
            x_codes = torch.nn.functional.pad(x_codes, (0, geometry.extra[0], 0, geometry.extra[1]))
        out = _integer_convolution(x_codes, w_encoded, geometry)
        # oneDNN returns channels-last. A contiguous model must get contiguous results: it may call `view` on
        # them.
        if not _is_channels_last(x_encoded.data, w_encoded.data):
            out = out.contiguous()
        out.mul_(x_encoded.scale)
        if bias is not None:
            out.add_(bias.view(-1, 1, 1))
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_codes, x_encoded.scale) if need_w else (None, None)),
            *((w_encoded.data, w_encoded.scale) if need_x else (None, None)),
        )
        ctx.x, ctx.weight, ctx.padded_shape = (x.shape, x.dtype), (weight.shape, weight.dtype), x_codes.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.geometry = geometry
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        # One call with decoded operands: folding the scales into g takes two calls, and both reorder their
        # operands (7.2 against 6.8 ms for 16x64x32x32, 22.6 against 24.0 for 16x256x16x16, without the passes
        # over g; Zen 5).
        narrow = gradient.bfloat16()
        x = _decoded(x_codes, x_scale, narrow, ctx.padded_shape)
        weight = _decoded(w_codes, w_scale, narrow, ctx.weight[0])
        place = (ctx.geometry.stride, ctx.geometry.padding, ctx.geometry.dilation, False, [0, 0])
        wanted = [w_codes is not None, x_codes is not None, False]
        dx, dw, db = torch.ops.aten.convolution_backward(
            narrow, x, weight, None, *place, ctx.geometry.groups, wanted
        )
        if dx is not None:
            dx = dx[:, :, : ctx.x[0][2], : ctx.x[0][3]].to(ctx.x[1])
        if dw is not None:
            dw = dw.to(ctx.weight[1])
        if ctx.needs_input_grad[2]:
            db = gradient.float().sum((0, 2, 3)).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


def _decoded(codes: Tensor | None, scale: Tensor | None, like: Tensor, shape: torch.Size) -> Tensor:
    """The operand in BF16; a placeholder of its shape, which is not read, if it was not saved."""
    if codes is None:
        return like.new_zeros(()).expand(shape)
    return codes.float().mul_(scale).bfloat16()


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

"""Convolutions of images on NVIDIA GPUs through CUTLASS, in INT8 and FP16."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.cutlass.linear import to_fp16
from qsync.backend.cutlass.products import Geometry, Scaling, conv, pad_channels
from qsync.backend.encoding import Encoded, Operand, encode
from qsync.backend.kernels.convolution.image_order import is_channels_first
from qsync.backend.kernels.fp16_tf32 import conv2d_fp16
from qsync.backend.kernels.linear import DTYPES
from qsync.operators.convolution import why_not_in_cutlass
from qsync.operators.precision import Precision


def unsupported(
    input: tuple[int, ...], weight: tuple[int, ...], dilation: Any = 1, groups: int = 1
) -> str | None:
    """Return why CUTLASS cannot compute a convolution of these shapes; None if it can.

    >>> unsupported((8, 64, 32, 32), (64, 2, 3, 3), groups=32)
    'CUTLASS has no grouped convolutions'
    """
    if len(input) != 4:
        return "CUTLASS needs a batch dimension"
    return why_not_in_cutlass([input, weight], any(d != 1 for d in _pair(dilation)))


def conv2d(precision: Precision) -> Callable[..., Tensor]:
    """Return the kernel of conv2d in `int8` or `fp16`; the backward pass is in FP16 for both.

        y  = s_x[n] s_w[k] conv(X, W) + b
        dx = conv_x(fp16(g s_w), W),   dW = conv_w(fp16(g s_x), X),   db = sum g

    X, W are INT8 codes, with one scale per image and output channel, or FP16 values with no scales. INT8
    tensor cores read operands along the inner dimension only, which for both gradients would require
    transposed copies of images. Gradients are therefore in FP16, scaled by a power of two. Saves the codes
    and scales only. x (n, C, h, w) and W (k, C, r, s); the result lies in channels-last order. Unsupported
    shapes run in FP16 through torch; INT8 warns once.

    >>> conv2d(Precision.INT8)(torch.conv2d, "fp32", Operand(x, x8), Operand(w, w8), bias, padding=1)
    """

    def kernel(
        target: Callable[..., Tensor],
        out_type: str,
        input: Operand,
        weight: Operand,
        bias: Operand | Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        reason = unsupported(tuple(input.value.shape), tuple(weight.value.shape), dilation, groups)
        if reason:
            if precision is not Precision.FP16:
                _warn_once(
                    f"conv2d in {precision}: {reason}; it runs in FP16: plan it in fp16 to be rid of this"
                )
            return conv2d_fp16(
                target, out_type, _to_half(input), _to_half(weight), bias, stride, padding, dilation, groups
            )
        bias = bias.value if isinstance(bias, Operand) else bias
        around, extra = _padding(padding, (weight.value.shape[2], weight.value.shape[3]))
        plan = _Plan(Geometry(_pair(stride), around, _pair(dilation)), extra, DTYPES[out_type])
        return differentiable(
            _Convolution, input.value, weight.value, bias, input.encoded, weight.encoded, plan
        )

    return kernel


def _to_half(operand: Operand) -> Operand:
    """Return an operand converted from any encoding to FP16."""
    half = operand.encoded.data.dtype is torch.float16
    return operand if half else Operand(operand.value, encode(operand.value, "fp16"))


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


class _Plan(NamedTuple):
    """Shapes and options of a convolution call; `extra` is the bottom and right padding of "same"."""

    geometry: Geometry
    extra: tuple[int, int]
    dtype: torch.dtype


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return (value, value)
    numbers = tuple(int(v) for v in value)
    return (numbers[0], numbers[-1])


def _padding(padding: Any, kernel: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the padding of each side, and the extra padding of "same" for an even filter."""
    if padding == "same":
        return ((kernel[0] - 1) // 2, (kernel[1] - 1) // 2), ((kernel[0] - 1) % 2, (kernel[1] - 1) % 2)
    return _pair(0 if padding == "valid" else padding), (0, 0)


class _Convolution(torch.autograd.Function):
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
        x_scale, w_scale = (None if e.scale is None else e.scale.reshape(-1) for e in (x_encoded, w_encoded))
        images, filters = _images(x_encoded.data, plan.extra), _filters_channels_last(w_encoded.data)
        sizes = _sizes(images, filters, plan.geometry)
        rows = sizes["p"] * sizes["q"]
        scaling = Scaling(rows=x_scale, columns=w_scale, bias=bias, rows_per_scale=rows)
        product = "fp16_fprop" if x_scale is None else "int8_fprop"
        y = conv(product, images, filters, sizes, scaling, plan.dtype).permute(0, 3, 1, 2)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((x_encoded.data, x_scale) if need_w else (None, None)),
            *((w_encoded.data, w_scale) if need_x else (None, None)),
        )
        ctx.plan, ctx.bias_dtype = plan, None if bias is None else bias.dtype
        ctx.x, ctx.weight = (x.shape, x.dtype), (weight.shape, weight.dtype)
        ctx.order = torch.contiguous_format if is_channels_first(x) else torch.channels_last
        return owned(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        g = gradient.permute(0, 2, 3, 1).contiguous()
        dx = dw = db = None
        if w_data is not None:
            dx = _input_gradient(g, w_data, w_scale, ctx.x[0], ctx.plan).to(ctx.x[1])
            dx = dx.contiguous(memory_format=ctx.order)
        if x_data is not None:
            dw = _weight_gradient(g, x_data, x_scale, ctx.weight[0], ctx.plan).to(ctx.weight[1])
        if ctx.needs_input_grad[2]:
            db = g.sum((0, 1, 2), dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None


def _input_gradient(
    g: Tensor, w_data: Tensor, w_scale: Tensor | None, shape: torch.Size, plan: _Plan
) -> Tensor:
    """Compute dx (n, C, h, w) in FP32, from g (n, p, q, k) and W (k, C, r, s)."""
    h, back = to_fp16(g, w_scale)
    h, filters = pad_channels(h), _filters_channels_last(w_data.to(torch.float16))
    filters = pad(filters, (0, 0, 0, 0, 0, 0, 0, h.shape[3] - len(filters)))
    height, width = shape[2] + plan.extra[0], shape[3] + plan.extra[1]
    sizes = _named(
        (len(h), height, width, filters.shape[3]), filters.shape, (h.shape[1], h.shape[2]), plan.geometry
    )
    dx = conv("fp16_dgrad", h, filters, sizes, Scaling(alpha=back))
    return dx[:, : shape[2], : shape[3], : shape[1]].permute(0, 3, 1, 2)


def _weight_gradient(
    g: Tensor, x_data: Tensor, x_scale: Tensor | None, shape: torch.Size, plan: _Plan
) -> Tensor:
    """Compute dW (k, C, r, s) in FP32, from g (n, p, q, k) and x (n, C, h, w)."""
    h, back = to_fp16(g, None if x_scale is None else x_scale.view(-1, 1, 1, 1))
    h, images = pad_channels(h), _images(x_data, plan.extra, torch.float16)
    filters = (h.shape[3], shape[2], shape[3], images.shape[3])
    sizes = _named(tuple(images.shape), filters, (h.shape[1], h.shape[2]), plan.geometry)
    dw = conv("fp16_wgrad", h, images, sizes, Scaling(alpha=back))
    return dw[: shape[0], :, :, : shape[1]].permute(0, 3, 1, 2).contiguous()


def _images(data: Tensor, extra: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
    """Return images as contiguous (n, h, w, C), channels padded; unsigned codes become signed."""
    last = data.permute(0, 2, 3, 1).contiguous()
    if last.dtype is torch.uint8:
        # Subtracting 128 in eight bits flips the top bit.
        last = last.view(torch.int8).bitwise_xor(-128) if dtype is None else last.to(dtype) - 128
    elif dtype is not None:
        last = last.to(dtype)
    return pad_channels(pad(last, (0, 0, 0, extra[1], 0, extra[0])) if any(extra) else last)


def _filters_channels_last(filters: Tensor) -> Tensor:
    """Return filters (k, C, r, s) as contiguous (k, r, s, C), channels padded."""
    return pad_channels(filters.permute(0, 2, 3, 1).contiguous())


def _sizes(images: Tensor, filters: Tensor, geometry: Geometry) -> dict[str, int]:
    out = geometry.out_size((images.shape[1], images.shape[2]), (filters.shape[1], filters.shape[2]))
    return _named(tuple(images.shape), tuple(filters.shape), out, geometry)


def _named(
    images: tuple[int, ...], filters: tuple[int, ...], out: tuple[int, int], geometry: Geometry
) -> dict[str, int]:
    """Return a convolution's sizes by conv.h's names: images nhwc, filters krsc, results npqk."""
    names = ("n", "h", "w", "c", "k", "r", "s", "p", "q")
    sizes = dict(zip(names, (*images, *filters[:3], *out), strict=True))
    for name, pair in (
        ("pad", geometry.padding),
        ("stride", geometry.stride),
        ("dilation", geometry.dilation),
    ):
        sizes[f"{name}_h"], sizes[f"{name}_w"] = pair
    return sizes

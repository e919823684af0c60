"""BF16 convolutions on CPUs: products of unfolded windows, or oneDNN, by shape.

convolution_int8.py describes the memory order of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import sum_columns
from qsync.backend.kernels.convolution.conv_geometry import Geometry, geometry_of
from qsync.backend.kernels.convolution.conv_products import (
    loop_pays,
    multiplies_windows,
    onednn_gradients,
    weight_rows,
    window_gradients,
    windows_of,
)
from qsync.backend.kernels.convolution.image_order import find_channels_last, with_own_strides
from qsync.backend.kernels.linear import DTYPES


def conv2d_bf16(
    target: Callable[..., Tensor],
    out_type: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Run a BF16 convolution as products of unfolded windows if faster, else by the target.

        y = W unfold(x) + b,   dx = fold(W' g),   dW = g unfold(x)'

    Windows are faster where the weight outweighs the images: oneDNN reorders the weight, and its
    gradient, at every call. ms forward and backward, one thread of a Zen 5: 20.3 against 7.0 for
    32x512x2x2 3x3, 9.1 against 2.6 for 32x256x4x4 to 512 with stride 2.

    >>> conv2d_bf16(torch.conv2d, "bf16", x.bfloat16(), w.bfloat16(), padding=1)
    """
    geometry = geometry_of(weight, stride, padding, dilation, groups)
    input, _ = find_channels_last(input)
    shapes = (input.shape, weight.shape)
    plain = input.ndim != 4 or any(geometry.extra)
    if plain or not (
        multiplies_windows(*shapes, geometry) or (weight.requires_grad and loop_pays(*shapes, geometry))
    ):
        if input.ndim == 4 and 1 in weight.shape:
            weight = with_own_strides(weight)
        return target(input, weight, bias, stride, padding, dilation, groups).to(DTYPES[out_type])
    return differentiable(_Bf16Convolution, input, weight, bias, geometry).to(DTYPES[out_type])


class _Bf16Convolution(torch.autograd.Function):
    """BF16 convolution that saves input and weight, and unfolds windows again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        ctx.shapes, ctx.geometry = (x.shape, weight.shape), geometry
        ctx.windows_pay = multiplies_windows(x.shape, weight.shape, geometry)
        if not ctx.windows_pay:
            return torch.conv2d(x, weight, bias, *geometry[:4])
        windows = windows_of(x, weight.shape, geometry)
        n, p, q = windows.shape[:3]
        y = torch.nn.functional.linear(windows.flatten(3).flatten(0, 2), weight_rows(weight), bias)
        return owned(y.view(n, p, q, len(weight)).permute(0, 3, 1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_shape, w_shape = ctx.shapes
        gradients = window_gradients if ctx.windows_pay else onednn_gradients
        dx, dw = gradients(g, x, weight, x_shape, w_shape, ctx.geometry)
        db = None
        if ctx.needs_input_grad[2]:
            db = sum_columns(g.permute(0, 2, 3, 1).flatten(0, 2).contiguous()).to(g.dtype)
        return None if dx is None else dx.to(g.dtype), dw, db, None

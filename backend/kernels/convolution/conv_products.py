"""Windows and gradients shared by INT8 and BF16 convolutions on CPUs."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from qsync.backend.casts.cast_ops import depthwise_weight_gradient, fold, unfold
from qsync.backend.kernel_cache import rounded_up
from qsync.backend.kernels.convolution.conv_geometry import Geometry
from qsync.backend.kernels.convolution.conv_strategy import bf16_windows_pay
from qsync.backend.kernels.linear_bf16 import transposed_product
from qsync.backend.shape_choices import choose


def multiplies_windows(x_shape: torch.Size, w_shape: torch.Size, geometry: Geometry) -> bool:
    """Return whether BF16 products of windows are faster than oneDNN for a convolution."""
    pixels = pixels_of(x_shape, w_shape, geometry)
    return bf16_windows_pay(pixels, w_shape, geometry.groups, max(geometry.stride) > 1)


def pixels_of(x_shape: torch.Size, w_shape: torch.Size, geometry: Geometry) -> int:
    """Return the number of pixels of the result, in all images."""
    sizes = zip(x_shape[2:], geometry.padding, geometry.dilation, w_shape[2:], geometry.stride, strict=True)
    return x_shape[0] * math.prod((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in sizes)


def windows_of(x: Tensor, w_shape: torch.Size, geometry: Geometry) -> Tensor:
    """Return the windows (n, p, q, kh, kw, C) of images (n, C, h, w), channels-last."""
    images = x.permute(0, 2, 3, 1).contiguous()
    kernel = (w_shape[2], w_shape[3])
    return unfold(images, kernel, geometry.stride, geometry.padding, geometry.dilation)


def weight_rows(weight: Tensor) -> Tensor:
    """Return a weight (c, C, kh, kw) as a matrix (c, kh kw C): a view if it lies channels-last."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), math.prod(weight.shape[1:]))


def window_gradients(
    g: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    x_shape: torch.Size,
    w_shape: torch.Size,
    geometry: Geometry,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx = fold(W' g) in FP32 and dW = g unfold(x)' in BF16, both channels-last."""
    pixels = g.permute(0, 2, 3, 1).contiguous()
    n, p, q, outputs = pixels.shape
    flat = pixels.view(n * p * q, outputs)
    dx = dw = None
    if weight is not None:
        dx = fold(
            (flat @ weight_rows(weight)).view(n, p, q, w_shape[2], w_shape[3], w_shape[1]),
            (x_shape[2], x_shape[3]),
            geometry.stride,
            geometry.padding,
            geometry.dilation,
        ).permute(0, 3, 1, 2)
    if x is not None:
        windows = windows_of(x, w_shape, geometry).flatten(3).flatten(0, 2)
        dw = (
            transposed_product(flat, windows)
            .view(outputs, w_shape[2], w_shape[3], w_shape[1])
            .permute(0, 3, 1, 2)
        )
    return dx, dw


def onednn_gradients(
    g: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    x_shape: torch.Size,
    w_shape: torch.Size,
    geometry: Geometry,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute a convolution's gradients by torch; a depthwise dW by a compiled loop where faster.

    An operand that was not saved is passed by shape alone.
    """
    dw = None
    if x is not None and loop_pays(x_shape, w_shape, geometry):
        dw, x = _weight_gradient_by_loop(g, x, w_shape, geometry), None
    absent = g.new_zeros(())
    dx, dw_of_torch, _ = torch.ops.aten.convolution_backward(
        g,
        absent.expand(x_shape) if x is None else x,
        absent.expand(w_shape) if weight is None else weight,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        [0, 0],
        geometry.groups,
        [weight is not None, x is not None, False],
    )
    return dx, dw_of_torch if dw is None else dw


def _weight_gradient_by_loop(g: Tensor, x: Tensor, w_shape: torch.Size, geometry: Geometry) -> Tensor:
    images, gradient = (t.permute(0, 2, 3, 1).contiguous() for t in (x, g))
    options = (geometry.stride, geometry.padding, geometry.dilation)
    return depthwise_weight_gradient(images, gradient, (w_shape[2], w_shape[3]), *options).to(x.dtype)


def loop_pays(x_shape: torch.Size, w_shape: torch.Size, geometry: Geometry) -> bool:
    """Return whether a compiled loop beats oneDNN for a depthwise BF16 weight gradient; timed once."""
    if w_shape[1] != 1 or geometry.groups != w_shape[0]:
        return False

    @cache
    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        x, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in (x_shape, w_shape))
        x, w = x.contiguous(memory_format=torch.channels_last), w.requires_grad_()
        return x, w, torch.conv2d(x, w, None, *geometry[:4])

    def by_loop() -> Tensor:
        x, w, y = leaves()
        return _weight_gradient_by_loop(y.detach(), x, w.shape, geometry)

    def by_torch() -> Tensor:
        _, w, y = leaves()
        return torch.autograd.grad(y, w, y.detach(), retain_graph=True)[0]

    key = ("depthwise", rounded_up(x_shape), tuple(w_shape), *map(tuple, geometry[:3]))
    with torch.enable_grad():
        return choose(key, [by_loop, by_torch]) == 0

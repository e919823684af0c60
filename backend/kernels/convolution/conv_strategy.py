"""Decide when a CPU computes a convolution as a product of unfolded windows. No torch.

Shared by the kernels and the memory model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def bf16_windows_pay(pixels: int, w_shape: Sequence[int], groups: int, strided: bool) -> bool:
    """Return whether BF16 products of windows beat oneDNN, forward and backward.

    `pixels` counts the result's pixels in all images. Unfolding time grows with pixels, oneDNN's reordering
    of the weight with outputs, so their ratio decides. Over 139 shapes with filters of 1, 3 and 5, both were
    equal at about 0.4 pixels per output without a stride, and at 4 with one (one thread of a Zen 4; 8 and 32
    on a Zen 5).
    """
    outputs, channels = w_shape[:2]
    return groups == 1 and channels >= 16 and 0 < 2 * pixels <= (8 if strided else 1) * outputs


def int8_windows_pay(pixels: int, w_shape: Sequence[int], groups: int) -> bool:
    """Return whether products of windows beat oneDNN for an INT8 convolution.

    oneDNN packs the weight after every optimizer step, 4.5 ns an element; windows cost about 0.05 ns an
    element, more with few channels. ms for packing, oneDNN, and unfolding with its product, one thread of a
    Zen 5: 0.26 + 1.6 and 2.2 for 16x64x32x32 3x3, 2.7 + 5.6 and 5.9 for 16x256x16x16 3x3, 10.5 + 1.4 and 1.0
    for 32x512x2x2 3x3.
    """
    outputs, channels, *window = w_shape
    if groups > 1:
        return False
    return math.prod(window) == 1 or (channels >= 16 and pixels < 90 * outputs)


def int8_gradient_unfolds(x_shape: Sequence[int], w_shape: Sequence[int], y_shape: Sequence[int]) -> bool:
    """Return whether the INT8 input gradient is computed from unfolded windows of the output gradient.

    Such a product has one scale per image, because windows overlap. With filters of one pixel, or results
    smaller than the input, products of pixels are folded instead, with one scale per pixel. x (n, C, h, w), W
    (c, C, kh, kw), y (n, c, p, q).
    """
    return math.prod(w_shape[2:]) > 1 and math.prod(x_shape[2:]) < 2 * math.prod(y_shape[2:])


def windows_bytes(
    precision: str, x_shape: Sequence[int], w_shape: Sequence[int], y_shape: Sequence[int]
) -> tuple[int, int]:
    """Return the bytes of a conv2d's unfolded windows, forward and backward; zero through oneDNN.

    x (n, C, h, w), W (c, C / groups, kh, kw), y (n, c, p, q).
    """
    pixels = y_shape[0] * math.prod(y_shape[2:])
    groups = x_shape[1] // max(w_shape[1], 1)
    strided = x_shape[0] * math.prod(x_shape[2:]) >= 2 * pixels
    elements = pixels * math.prod(w_shape[1:])
    backward = 2 * elements if bf16_windows_pay(pixels, w_shape, groups, strided) else 0
    if precision == "bf16":
        return backward, backward
    return (elements if int8_windows_pay(pixels, w_shape, groups) else 0), backward


def packed_bytes(x_shape: Sequence[int], w_shape: Sequence[int], y_shape: Sequence[int]) -> int:
    """Return the bytes of a conv2d's INT8 weight packed by oneDNN; zero for windows.

    They live until the optimizer's step: codes, and per output channel a sum (4 bytes) and a zero point (8).
    """
    if windows_bytes("int8", x_shape, w_shape, y_shape)[0]:
        return 0
    return math.prod(w_shape) + 12 * w_shape[0]

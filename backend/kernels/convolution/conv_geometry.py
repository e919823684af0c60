"""Stride, padding, dilation and groups of a convolution, as numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Geometry(NamedTuple):
    """A convolution's geometry; `extra` is the right and bottom padding of "same", (width, height)."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    extra: tuple[int, int]


def single(value: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return a 1-D convolution's argument (a number or a tuple) as a tuple of one."""
    return (value,) if isinstance(value, int) else tuple(value)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else [int(v) for v in value] * (2 // len(value))


def geometry_of(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    """Return the geometry of a 2-D convolution call, for a weight (c, C / groups, kh, kw)."""
    dilation = _pair(dilation)
    extra = (0, 0)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding, extra = tuple(t // 2 for t in total), (total[1] % 2, total[0] % 2)
    return Geometry(_pair(stride), _pair(padding), dilation, groups, extra)

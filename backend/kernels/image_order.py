"""Bring images (n, C, h, w) into one of torch's two memory orders: channels first (contiguous), or last."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsync.backend.casts.cast_ops import transpose_last


def lies_channels_last(x: Tensor) -> bool:
    """Return whether images lie in channels-last order, be it in contiguous order as well."""
    return x.is_contiguous(memory_format=torch.channels_last)


def is_channels_first(x: Tensor) -> bool:
    """Return whether images lie in contiguous order and in no other."""
    return x.is_contiguous() and not lies_channels_last(x)


def is_one_channel(x: Tensor) -> bool:
    """Return whether images are in both orders; torch treats such ones, and a result, as contiguous."""
    return x.shape[1] == 1 and x.is_contiguous()


def channels_first(x: Tensor) -> Tensor:
    """Return images (n, C, h, w) in contiguous order."""
    last = x.permute(0, 2, 3, 1)
    if x.is_contiguous() or not last.is_contiguous():
        return x.contiguous()
    pixels = last.view(len(last), math.prod(last.shape[1:3]), last.shape[3])
    return transpose_last(pixels, x.dtype).view(x.shape)


def channels_last(x: Tensor) -> Tensor:
    """Return images (n, C, h, w) in channels-last order, those of one channel with its strides."""
    if is_one_channel(x):
        return x.view(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
    if not is_channels_first(x):
        return x.contiguous(memory_format=torch.channels_last)
    pixels = transpose_last(x.view(*x.shape[:2], math.prod(x.shape[2:])), x.dtype)
    return pixels.view(len(x), *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)

"""Convert images (n, C, h, w) between torch's memory orders: channels-first (contiguous) and -last."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, is_recorded, once_differentiable, untraced
from qsync.backend.casts.cast_ops import transpose_last

ORDERS = (torch.channels_last, torch.contiguous_format)  # lowered convolutions' order first


def lies_channels_last(x: Tensor) -> bool:
    """Return whether images are in channels-last order, even if they are also contiguous."""
    return x.is_contiguous(memory_format=torch.channels_last)


def is_channels_first(x: Tensor) -> bool:
    """Return whether images are contiguous and not also channels-last."""
    return x.is_contiguous() and not lies_channels_last(x)


def is_one_channel(x: Tensor) -> bool:
    """Return whether images are in both orders; torch then treats them and results as contiguous."""
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


def own_order(t: Tensor) -> torch.memory_format | None:
    """Return the memory order of images or filters; None if they are in neither."""
    return next((order for order in ORDERS if t.is_contiguous(memory_format=order)), None)


def ordered(images: Tensor, order: torch.memory_format) -> Tensor:
    """Return images in a memory order."""
    return channels_last(images) if order is torch.channels_last else channels_first(images)


def laid_out(
    gradient: Tensor, shape: torch.Size, strides: tuple[int, ...], order: torch.memory_format | None
) -> Tensor:
    """Return a gradient with the strides of its tensor, if that tensor is in one of the orders."""
    return gradient if order is None else ordered(gradient, order).as_strided(shape, strides)


def with_own_strides(weight: Tensor) -> Tensor:
    """Return a weight whose gradient keeps the weight's strides, even of dimensions of size 1.

    DDP's buckets have a parameter's own strides; torch restores only those of larger dimensions.
    """
    return differentiable(_OwnStrides, weight)


def receive_in_own_order(images: Tensor) -> None:
    """Reorder the gradient of these images to their own memory order before it goes further back.

    From a row-major gradient, batch norm's backward of channels-last images takes four times as long (BF16,
    Xeon with AMX). A hook leaves the images as they are: they may be overwritten.
    """
    if images.requires_grad:
        like = images.shape, images.stride(), own_order(images)

        def reordered(gradient: Tensor) -> Tensor:
            return gradient if is_recorded(gradient) else laid_out(gradient, *like)

        images.register_hook(reordered)  # type: ignore[no-untyped-call]


def find_channels_last(images: Tensor, data: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return images, and their data for computing (`data`, or themselves), in channels-last order.

    The gradient of the images returns in their own order.
    """
    if images.ndim != 4 or (lies_channels_last(images) and not is_one_channel(images)):
        return images, images if data is None else data
    if data is None:
        images = differentiable(_Reordered, images, True)
        return images, images
    return differentiable(_Reordered, images, False), channels_last(data)


class _Reordered(torch.autograd.Function):
    """Images in channels-last order whose gradient returns in their own order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reorders: bool) -> Tensor:
        ctx.channels_first = is_channels_first(x)
        return channels_last(x) if reorders else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return channels_first(gradient) if ctx.channels_first else gradient, None


class _OwnStrides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = (x.shape, x.stride(), own_order(x))
        return x.view_as(x)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if is_recorded(gradient) else laid_out(gradient, *ctx.like)

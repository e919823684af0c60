"""Attention operands as one matrix per head, with shared and broadcast heads resolved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import owned


class AttentionOptions(NamedTuple):
    """Options of scaled_dot_product_attention; `grouped` is its `enable_gqa`."""

    dropout_p: float
    is_causal: bool
    scale: float
    grouped: bool


class Heads:
    """Queries (..., L, D), keys (..., S, D) and values (..., S, V) as `count` matrices each.

    The dimensions before the last two broadcast to `batch`. With `grouped` one key and value serve
    several queries, as with torch's `enable_gqa`.
    """

    def __init__(self, operands: Sequence[Tensor], mask: Tensor | None, grouped: bool) -> None:
        query, key, _ = operands
        self.groups = query.shape[-3] // key.shape[-3] if grouped else 1
        shapes = [tuple(t.shape[:-2]) for t in operands]
        shapes[1:] = [(*s[:-1], s[-1] * self.groups) if s else s for s in shapes[1:]]
        self.batch = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        self.count = math.prod(self.batch)
        self.scores_shape = (*self.batch, query.shape[-2], key.shape[-2])
        self._masks = None
        if mask is not None:
            mask = torch.atleast_2d(mask)  # type: ignore[no-untyped-call]
            self._masks = mask.reshape(-1, *mask.shape[-2:])
            numbers = torch.arange(len(self._masks), device=mask.device).view(mask.shape[:-2])
            self._mask_of = numbers.expand(self.batch).reshape(-1)  # for every head

    def per_head(self, j: int, t: Tensor) -> Tensor:
        """Return operand `j`, or a tensor with the same leading dimensions, as (count, ..., ...)."""
        if self.groups > 1 and j > 0:
            t = t.repeat_interleave(self.groups, -3)
        return t.expand(*self.batch, *t.shape[-2:]).reshape(self.count, *t.shape[-2:])

    def mask(self, heads: slice) -> Tensor | None:
        """Return the mask of some heads, (heads or 1, L or 1, S or 1)."""
        if self._masks is None or len(self._masks) == 1:
            return self._masks
        return self._masks[self._mask_of[heads]]

    def operand_gradient(self, gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the gradient of an operand of this shape, summed over the heads that share it."""
        whole = gradient.view(*self.batch, *gradient.shape[1:])
        if whole.shape == shape:
            return whole.to(dtype)
        if self.groups > 1 and shape[-3] != whole.shape[-3]:
            shared = whole.float().unflatten(-3, (-1, self.groups))  # type: ignore[no-untyped-call]
            whole = shared.sum(-3)
        return whole.float().sum_to_size(shape).to(dtype)

    def in_torch_order(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Return results (count, L, V) as (..., L, V), in the memory order of torch's kernel.

        Models rely on this order: merging heads is then a view.
        """
        y = y.view(*self.batch, *y.shape[1:])
        if y.ndim < 4:
            return owned(y.to(dtype))
        return owned(y.transpose(-3, -2).to(dtype).contiguous().transpose(-3, -2))

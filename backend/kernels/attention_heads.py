"""Attention's operands as matrices, one per head, whatever they share and broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Heads:
    """Queries (..., L, D), keys (..., S, D) and values (..., S, V) as `count` matrices each.

    The dimensions before the last two broadcast; with `grouped` one key and value serve several queries, as
    torch's `enable_gqa` has it. `batch` is what they broadcast to.
    """

    def __init__(self, operands: Sequence[Tensor], mask: Tensor | None, grouped: bool) -> None:
        query, key, _ = operands
        self.groups = query.shape[-3] // key.shape[-3] if grouped else 1
        shapes = [t.shape[:-2] for t in operands]
        shapes[1:] = [(*s[:-1], s[-1] * self.groups) if s else s for s in shapes[1:]]
        self.batch = torch.broadcast_shapes(*shapes)
        self.count = math.prod(self.batch)
        self.scores_shape = (*self.batch, query.shape[-2], key.shape[-2])
        self._masks = None
        if mask is not None:
            mask = torch.atleast_2d(mask)
            self._masks = mask.reshape(-1, *mask.shape[-2:])
            numbers = torch.arange(len(self._masks), device=mask.device).view(mask.shape[:-2])
            self._mask_of = numbers.expand(self.batch).reshape(-1)  # for every head

    def per_head(self, j: int, t: Tensor) -> Tensor:
        """Operand `j`, or what has its shape but for the last two dimensions, as (count, ..., ...)."""
        if self.groups > 1 and j > 0:
            t = t.repeat_interleave(self.groups, -3)
        return t.expand(*self.batch, *t.shape[-2:]).reshape(self.count, *t.shape[-2:])

    def mask(self, some: slice) -> Tensor | None:
        """The mask of some heads, (heads or 1, L or 1, S or 1)."""
        if self._masks is None or len(self._masks) == 1:
            return self._masks
        return self._masks[self._mask_of[some]]

    def gathered(self, gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of an operand of this shape, summed over the heads that share it."""
        whole = gradient.view(*self.batch, *gradient.shape[1:])
        if whole.shape == shape:
            return whole.to(dtype)
        if self.groups > 1 and shape[-3] != whole.shape[-3]:
            whole = whole.float().unflatten(-3, (-1, self.groups)).sum(-3)
        return whole.float().sum_to_size(shape).to(dtype)

    def beside_each_other(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Results (count, L, V) as (..., L, V), in the order in which torch's kernel leaves them.

        Models ask for it: heads beside each other, so that what follows is a view.
        """
        y = y.view(*self.batch, *y.shape[1:])
        if y.ndim < 4:
            return y.to(dtype)
        return y.transpose(-3, -2).to(dtype).contiguous().transpose(-3, -2)

"""Grouped products for mixture-of-experts layers on CPUs, in BF16 and FP32.

Each expert's weight multiplies the rows routed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qsync.backend.autograd import differentiable, once_differentiable
from qsync.backend.kernels.linear import DTYPES

# oneDNN prepares a product for every new number of rows, which takes longer than multiplying 128 rows.
# Routing changes the numbers in every step, so products use multiples of this many rows.
BLOCK_ROWS = 32


def grouped_mm_bf16(
    target: Callable[..., Tensor], out_type: str, input: Tensor, weight: Tensor, offs: Tensor
) -> Tensor:
    """Compute y = x_e W_e for the rows x_e of every expert e, and its gradients, in BF16.

    Input (rows, K) is sorted by expert, weight is (experts, K, N). `offs` says where each expert's rows end;
    rows after the last are zeros in y.
    """
    return differentiable(_Groups, input, weight, offs, BLOCK_ROWS).to(DTYPES[out_type])


def grouped_mm_fp32(
    target: Callable[..., Tensor], out_type: str, input: Tensor, weight: Tensor, offs: Tensor
) -> Tensor:
    """Compute y = x_e W_e and gradients in FP32 by the traced call, which clears each result first."""
    return differentiable(_Groups, input.float(), weight.float(), offs, 1).to(DTYPES[out_type])


class _Groups(torch.autograd.Function):
    """Grouped product whose row counts are rounded up to multiples of a block."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offs: Tensor, block: int) -> Tensor:
        need_rows, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(rows if need_weight else None, weight if need_rows else None, offs)
        ctx.like, ctx.block = (weight.shape, weight.stride()), block
        return _products(rows, weight, offs, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, offs = ctx.saved_tensors
        d_rows = d_weight = None
        if weight is not None:
            d_rows = _products(gradient, weight.mT, offs, ctx.block)
        if rows is not None:
            d_weight = rows.new_empty_strided(*ctx.like)
            for expert, start, end in _groups(offs):
                left, right = (_padded(one[start:end], ctx.block) for one in (rows, gradient))
                torch.mm(left.mT, right, out=d_weight[expert])
        return d_rows, d_weight, None, None


def _products(rows: Tensor, weight: Tensor, offs: Tensor, block: int) -> Tensor:
    """Return the products of all groups.

    A rounded-up product also covers the next groups' first rows, which their own products then overwrite.
    """
    found = rows.new_empty(len(rows), weight.shape[2])
    end = 0
    for expert, start, end in _groups(offs):
        stop = start + _blocks(end - start, block)
        if stop <= len(rows):
            torch.mm(rows[start:stop], weight[expert], out=found[start:stop])
        else:
            found[start:end] = (_padded(rows[start:end], block) @ weight[expert])[: end - start]
    found[end:] = 0
    return found


def _groups(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each expert with the start and end of its rows."""
    start = 0
    for expert, end in enumerate(offs.tolist()):
        yield expert, start, end
        start = end


def _blocks(num_rows: int, block: int) -> int:
    return -(-num_rows // block) * block


def _padded(rows: Tensor, block: int) -> Tensor:
    more = _blocks(len(rows), block) - len(rows)
    return pad(rows, (0, 0, 0, more)) if more else rows

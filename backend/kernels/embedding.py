"""Embeddings in BF16 and INT8: the rows that a batch looks up are rounded, the table never is.

A table of 50,000 rows is looked up at 1,024 places: rounding it whole would cost more than everything that
the rounding is to save. What is gained lies downstream, where sums of embeddings and the norm behind them run
in 16 bits; the lookup itself takes as long as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend.casts.cast_ops import decode_rows, narrow, quantize_rows
from qsync.backend.kernels.linear import DTYPES


def embedding_bf16(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Y = bf16(W[i]), dW = sum over lookups of g, in FP32.

    `target` and the arguments are those of the original call, the table W (rows, width) in FP32 among them;
    y (..., width) is in `out_type`. The gradient comes in the type of y and is widened before it is added up,
    so a row that a batch looks up a thousand times gets an FP32 sum (ours). Saves the indices only.

    >>> embedding_bf16(F.embedding, "bf16", tokens, table)
    """
    return narrow(target(*args, **kwargs)).to(DTYPES[out_type])


def embedding_int8(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Y = s round(W[i] / s) with s = max |W[i]| / 127, one per lookup, and dW as `embedding_bf16`'s.

    Handed on as other INT8 operators hand on: already decoded, in `out_type` (ours). Saves the indices only.

    >>> embedding_int8(F.embedding, "fp32", tokens, table)
    """
    return _Rounded.apply(target(*args, **kwargs), DTYPES[out_type])


class _Rounded(torch.autograd.Function):
    """Rows (..., width) -> what their INT8 codes stand for, in `dtype`; the gradient passes straight on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = rows.dtype
        codes, scale = quantize_rows(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]).contiguous())
        decode = decode_rows if dtype is torch.bfloat16 else _decode_wide
        return decode(codes, scale).view(rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.to(ctx.dtype), None


def _decode_wide(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float().mul_(scale.unsqueeze(1))

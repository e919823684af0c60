"""Embeddings in BF16 and INT8: only the looked-up rows are rounded, never the table.

A batch reads 1,024 rows of a table of 50,000: rounding the whole table would cost more than it saves. The
gain lies downstream, where sums of embeddings and the next norm run in 16 bits; the lookup itself is not
faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, owned
from qsync.backend.casts.cast_ops import decode_rows, quantize_rows, to_bf16
from qsync.backend.kernels.linear import DTYPES


def embedding_bf16(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Look up y = bf16(W[i]), with dW = sum over lookups of g, in FP32.

    `target` and the arguments are those of the original call, the table W (rows, width) in FP32 among
    them; y (..., width) is in `out_type`. The gradient arrives in the type of y and is widened before it
    is added up, so a row that a batch looks up a thousand times gets an FP32 sum. Saves the indices only.

    >>> embedding_bf16(F.embedding, "bf16", tokens, table)
    """
    return to_bf16(target(*args, **kwargs)).to(DTYPES[out_type])


def embedding_int8(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Look up y = s round(W[i] / s), s = max |W[i]| / 127; dW is the FP32 sum of g over lookups.

    There is one s per lookup. The result is decoded to `out_type`. Saves the indices only.

    >>> embedding_int8(F.embedding, "fp32", tokens, table)
    """
    return differentiable(_Rounded, target(*args, **kwargs), DTYPES[out_type])


class _Rounded(torch.autograd.Function):
    """Round rows to INT8 codes and decode them to `dtype`; pass the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = rows.dtype
        codes, scale = quantize_rows(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]).contiguous())
        decode = decode_rows if dtype is torch.bfloat16 else _decode_wide
        return owned(decode(codes, scale).view(rows.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def _decode_wide(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float().mul_(scale.unsqueeze(1))

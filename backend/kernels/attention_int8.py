"""Attention in INT8: scores from INT8 products, softmax in FP32, the other products in BF16, a few heads at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsync.backend.encoding import Encoded, Operand
from qsync.backend.kernels.attention_heads import Heads
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.kernels.matmul import decode_matrices, scaled_products

# Scores of as many heads as fit 512 KB, a core's share of the cache, go through all their passes together. ms
# forward and backward of 64 heads of 128x128, by scores at a time: 2^14: 20.7, 2^16: 15.0, 2^17: 14.7, 2^18:
# 15.9; of 8 heads of 256x256: 4.7, 4.5, 4.0, 6.1 (one thread of a Zen 5; torch in FP32: 12.4 and 2.8). Where
# freed memory is kept (allocation.py) 18.2, 9.7, 8.5, 7.8; of 32 heads of 512x512 38 each, torch in FP32 83.
_SCORES_AT_A_TIME = 2**17


def attention_int8(
    target: Callable[..., Tensor],
    out_type: str,
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Y = dropout(softmax(c Q K' + mask)) V with Q K' in INT8, gradients through BF16 products.

        S = c s_q s_k (Q K')      Q, K, V the INT8 codes with one scale per row; c is `scale`           (ours)
        y = bf16(P) bf16(s_v V),  P = softmax(S + mask) in FP32

    Arguments as torch's scaled_dot_product_attention; q, k, v are encoded "row". Saves the codes and scales,
    the mask as it is, and a byte per score of a dropout: backward computes S and P again. P stays in 16 bits:
    quantizing it takes a pass over the scores, and its product is no faster then.

    >>> q, k, v = (Operand(x, encode(x, "int8_row")) for x in (q, k, v))
    >>> attention_int8(F.scaled_dot_product_attention, "fp32", q, k, v, is_causal=True)
    """
    scale = 1 / math.sqrt(query.value.shape[-1]) if scale is None else scale
    options = _Options(dropout_p, is_causal, scale, enable_gqa)
    operands = (query, key, value)
    values, codes = [o.value for o in operands], [o.encoded for o in operands]
    return _Int8Attention.apply(*values, attn_mask, *codes, options, DTYPES[out_type])


class _Options(NamedTuple):
    dropout_p: float
    is_causal: bool
    scale: float
    grouped: bool


class _Int8Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        q: Encoded,
        k: Encoded,
        v: Encoded,
        options: _Options,
        dtype: torch.dtype,
    ) -> Tensor:
        operands = (q.data, q.scale, k.data, k.scale, v.data, v.scale)
        heads = _Heads(operands, mask, None, options)
        if options.dropout_p:
            noise = torch.empty(heads.scores_shape, dtype=torch.uint8, device=query.device)
            heads.noise = noise.bernoulli_(1 - options.dropout_p)
        ctx.save_for_backward(*operands, mask, heads.noise)
        ctx.options, ctx.values = options, [(t.shape, t.dtype) for t in (query, key, value)]
        values = heads.decoded(2)
        y = values.new_empty((heads.count, query.shape[-2], value.shape[-1]))
        for some in heads.chunks():
            torch.bmm(heads.dropped(heads.weights(some), some).to(y.dtype), values[some], out=y[some])
        return heads.beside_each_other(y, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *operands, mask, noise = ctx.saved_tensors
        heads = _Heads(operands, mask, noise, ctx.options)
        q, k, v = (heads.decoded(j) for j in range(3))
        g = gradient.to(q.dtype).reshape(heads.count, *gradient.shape[-2:])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        need_mask = ctx.needs_input_grad[3]
        d_mask = gradient.new_empty((heads.count, *heads.scores_shape[-2:])) if need_mask else None
        for some in heads.chunks():
            weights = heads.weights(some)
            torch.bmm(heads.dropped(weights, some).to(q.dtype).mT, g[some], out=dv[some])
            # Widened before anything is subtracted: the softmax's gradient is a difference.
            d_weights = heads.dropped(torch.bmm(g[some], v[some].mT).float(), some)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, torch.float32)
            if d_mask is not None:
                d_mask[some] = d_scores
            narrow = d_scores.mul_(ctx.options.scale).to(q.dtype)
            torch.bmm(narrow, k[some], out=dq[some])
            torch.bmm(narrow.mT, q[some], out=dk[some])
        if d_mask is not None:
            d_mask = d_mask.view(heads.scores_shape).sum_to_size(mask.shape).to(mask.dtype)
        found = (heads.gathered(d, *ctx.values[j]) for j, d in enumerate((dq, dk, dv)))
        return *found, d_mask, None, None, None, None, None


class _Heads(Heads):
    """The scores of INT8 operands, computed for some heads at a time."""

    def __init__(
        self, operands: Sequence[Tensor], mask: Tensor | None, noise: Tensor | None, options: _Options
    ) -> None:
        self._codes, self._scales, self._options = operands[::2], operands[1::2], options
        super().__init__(self._codes, mask, options.grouped)
        self.noise = noise
        self._matrices = [self.per_head(j, t[j]) for t in (self._codes, self._scales) for j in (0, 1)]

    def decoded(self, j: int) -> Tensor:
        """Operand `j` in the float of the products that are not in INT8, (heads, length, width)."""
        return self.per_head(j, decode_matrices(self._codes[j], self._scales[j]))

    def chunks(self) -> list[slice]:
        step = max(_SCORES_AT_A_TIME // max(math.prod(self.scores_shape[-2:]), 1), 1)
        return [slice(i, min(i + step, self.count)) for i in range(0, self.count, step)]

    def weights(self, some: slice) -> Tensor:
        """softmax(S + mask) of some heads, in FP32."""
        q, k, rows, columns = (t[some] for t in self._matrices)
        scores = scaled_products(q, k.mT, rows * self._options.scale, columns.mT, torch.float32)
        length, positions = self.scores_shape[-2:]
        if self._options.is_causal:
            later = torch.ones(length, positions, dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(later, -math.inf)
        mask = self.mask(some)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores.add_(mask)
            return torch._safe_softmax(scores, -1)
        return torch.softmax(scores, -1)

    def dropped(self, weights: Tensor, some: slice) -> Tensor:
        if self.noise is None:
            return weights
        kept = self.noise.view(self.count, *self.scores_shape[-2:])[some]
        return weights * kept.to(weights.dtype).div_(1 - self._options.dropout_p)

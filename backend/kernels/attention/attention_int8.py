"""Attention in INT8: scores from INT8 products, softmax in FP32, the other products in BF16.

All passes run over the scores of a few heads at a time (`qsync.backend.block_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable
from qsync.backend.block_sizes import scores_per_block
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.kernels.attention.attention_heads import AttentionOptions, Heads
from qsync.backend.kernels.attention.attention_short import attention_short
from qsync.backend.kernels.attention.attention_strategy import saves_weights
from qsync.backend.kernels.dropout import draw_kept
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.kernels.matmul import decode_matrices, scaled_products


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
    """Compute dropout(softmax(c Q K' + mask)) V with Q K' in INT8 and gradients in BF16.

        S = c s_q s_k (Q K')      Q, K, V the INT8 codes with one scale per row; c is `scale`
        y = bf16(P) bf16(s_v V),  P = softmax(S + mask) in FP32

    Arguments as torch's scaled_dot_product_attention; q, k, v are encoded "row". Saves codes and scales, the
    mask, and a byte per score under dropout; backward recomputes S and P. P stays in 16 bits: quantizing it
    takes another pass, and its product is no faster.

    >>> q, k, v = (Operand(x, encode(x, "int8_row")) for x in (q, k, v))
    >>> attention_int8(F.scaled_dot_product_attention, "fp32", q, k, v, is_causal=True)
    """
    scale = 1 / math.sqrt(query.value.shape[-1]) if scale is None else scale
    options = AttentionOptions(dropout_p, is_causal, scale, enable_gqa)
    operands = (query, key, value)
    if query.value.device.type == "cpu" and saves_weights(key.value.shape[-2], dropout_p):
        values, encoded = [operand.value for operand in operands], [operand.encoded for operand in operands]
        return attention_short(values, encoded, attn_mask, options, DTYPES[out_type])
    call = _Call((query.encoded, key.encoded, value.encoded), options, DTYPES[out_type])
    return differentiable(_Int8Attention, query.value, key.value, value.value, attn_mask, call)


class _Call(NamedTuple):
    """Options and operands of an INT8 attention call without its differentiable tensors."""

    operands: tuple[Encoded, Encoded, Encoded]  # q, k, v
    options: AttentionOptions
    dtype: torch.dtype  # of the result


class _Int8Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        call: _Call,
    ) -> Tensor:
        options = call.options
        operands = [tensor for encoded in call.operands for tensor in (encoded.data, encoded.code_scale)]
        heads = _Heads(operands, mask, None, options)
        if options.dropout_p:
            heads.noise = draw_kept(heads.scores_shape, options.dropout_p, query.device)
        ctx.save_for_backward(*operands, mask, heads.noise)
        ctx.options, ctx.values = options, [(t.shape, t.dtype) for t in (query, key, value)]
        values = heads.decoded(2)
        y = values.new_empty((heads.count, query.shape[-2], value.shape[-1]))
        for some in heads.chunks():
            torch.bmm(heads.dropped(heads.weights(some), some).to(y.dtype), values[some], out=y[some])
        return heads.in_torch_order(y, call.dtype)

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
            # Widened before the subtraction: the softmax's gradient is a difference of close numbers.
            d_weights = heads.dropped(torch.bmm(g[some], v[some].mT).float(), some)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, torch.float32)
            if d_mask is not None:
                d_mask[some] = d_scores
            rounded = d_scores.mul_(ctx.options.scale).to(q.dtype)
            torch.bmm(rounded, k[some], out=dq[some])
            torch.bmm(rounded.mT, q[some], out=dk[some])
        if d_mask is not None:
            d_mask = d_mask.view(heads.scores_shape).sum_to_size(mask.shape).to(mask.dtype)
        found = (heads.operand_gradient(d, *ctx.values[j]) for j, d in enumerate((dq, dk, dv)))
        return *found, d_mask, None


class _Heads(Heads):
    """The scores of INT8 operands, computed for some heads at a time."""

    def __init__(
        self, operands: Sequence[Tensor], mask: Tensor | None, noise: Tensor | None, options: AttentionOptions
    ) -> None:
        self._codes, self._scales, self._options = operands[::2], operands[1::2], options
        super().__init__(self._codes, mask, options.grouped)
        self.noise = noise
        self._matrices = [self.per_head(j, t[j]) for t in (self._codes, self._scales) for j in (0, 1)]

    def decoded(self, j: int) -> Tensor:
        """Decode operand `j` as (heads, length, width), for the products in 16 bits."""
        return self.per_head(j, decode_matrices(self._codes[j], self._scales[j]))

    def chunks(self) -> list[slice]:
        """Yield ranges of heads that are computed together."""
        most = scores_per_block(self._codes[0].device.type)
        step = max(most // max(math.prod(self.scores_shape[-2:]), 1), 1)
        return [slice(i, min(i + step, self.count)) for i in range(0, self.count, step)]

    def weights(self, some: slice) -> Tensor:
        """Return softmax(S + mask) of some heads, in FP32."""
        q, k, rows, columns = (t[some] for t in self._matrices)
        scores = scaled_products(q, k.mT, rows * self._options.scale, columns.mT, torch.float32)
        length, positions = self.scores_shape[-2:]
        if self._options.is_causal:
            later = torch.ones(length, positions, dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(later, -math.inf)
        if (mask := self.mask(some)) is not None:
            scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores.add_(mask)
            return torch._safe_softmax(scores, -1)
        return torch.softmax(scores, -1)

    def dropped(self, weights: Tensor, some: slice) -> Tensor:
        """Apply dropout to the attention weights of some heads."""
        if self.noise is None:
            return weights
        kept = self.noise.view(self.count, *self.scores_shape[-2:])[some]
        return weights * kept.to(weights.dtype).div_(1 - self._options.dropout_p)

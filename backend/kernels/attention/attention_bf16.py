"""Attention in BF16 on CPUs: oneDNN's BF16 products, softmax in FP32, some scores at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable
from qsync.backend.block_sizes import SCORES_PER_BLOCK
from qsync.backend.devices.kernel_timing import least_s
from qsync.backend.kernels.attention.attention_heads import AttentionOptions, Heads
from qsync.backend.kernels.attention.attention_short import attention_short
from qsync.backend.kernels.attention.attention_strategy import saves_weights, torch_fuses
from qsync.backend.kernels.attention.softmax import Scores, softmax, softmax_gradient
from qsync.backend.kernels.dropout import draw_kept
from qsync.backend.kernels.linear import DTYPES

# Rows of a block under a causal mask: few scores right of the diagonal are computed.
_CAUSAL_ROWS = 128
_SHORT = 128  # keys, up to which torch's kernel was slower on every measured CPU
_TIMED_SCORES = 2**19  # scores of the trial heads, enough to hide call overhead


def attention_bf16(
    target: Callable[..., Tensor],
    out_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute dropout(softmax(c Q K' + mask)) V on BF16 operands, by oneDNN's products.

        S = H + R,   H = bf16(Q K'),   R = bf16(Q K' - H)      a second product: 16 bits of S
        y = bf16(D P) V,   P = softmax(c S + mask) in FP32,   D = keep / (1 - p)
        dV = bf16(D P)' g,   dS = P (D g V' - sum(g y)),   dQ = c bf16(dS) K,   dK = c bf16(dS)' Q

    Arguments as torch's scaled_dot_product_attention; c is `scale`. Saves the same as torch's kernel: q, k,
    v, the result, the mask (bools as numbers), and each row's log sum exp. Dropout draws torch's random
    numbers and costs a byte per score. Backward computes P again. Few keys (`saves_weights`) run
    `attention_short`, which saves P.

    ms forward and backward of 64 heads of 128x64, torch in FP32, torch in BF16 and this: 11.9, 20.1, 8.0;
    with dropout 19.5, 19.0, 13.9; causal, 12 heads of 1024x64: 95, 73, 58 (one thread of a Zen 5).

    >>> attention_bf16(F.scaled_dot_product_attention, "bf16", q.bfloat16(), k.bfloat16(), v.bfloat16())
    """
    if not (query.numel() and key.numel() and value.numel()):  # empty: nothing to multiply
        y = target(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return y.to(DTYPES[out_type])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = AttentionOptions(dropout_p, is_causal, scale, enable_gqa)
    if saves_weights(key.shape[-2], dropout_p):
        return attention_short((query, key, value), None, attn_mask, options, DTYPES[out_type])
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        hidden = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = hidden.masked_fill_(~attn_mask, -math.inf)
    return differentiable(_Bf16Attention, query, key, value, attn_mask, options, DTYPES[out_type])


def fastest_attention_bf16(
    target: Callable[..., Tensor],
    out_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention in BF16 by `attention_bf16`, or by torch's kernel where faster (long sequences).

    Each number of keys, rounded up to a power of two, is timed once; with gradients from 129 on. Time
    relative to torch on one thread of a Zen 4: 0.7 for 128 keys, 1.0 for 256, 1.4 for 2048; without gradients
    on a Xeon without AMX 2 for 128. Both kernels save the same tensors. torch's is not used with dropout, or
    where its fused kernel refuses the operands: it then saves all scores three times, in FP32 (25 MB, not
    0.5, for 32 heads of 128x128). Keys shared by all queries are passed to torch as a group: otherwise only
    its plain kernel accepts them (3 times as long for 1024).

    >>> fastest_attention_bf16(F.scaled_dot_product_attention, "bf16", q, k, v)
    """
    options = (attn_mask, dropout_p, is_causal)
    one_head = query.ndim == 4 and key.shape[:2] == value.shape[:2] == (len(query), 1)
    enable_gqa = enable_gqa or one_head
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    masks = [] if attn_mask is None else [(attn_mask.ndim, attn_mask.requires_grad)]
    is_fused = torch_fuses(query.shape, value.shape[-1], dropout_p, masks)
    if is_fused and key.numel() and (key.shape[-2] > _SHORT or not trains):
        keys = 1 << (key.shape[-2] - 1).bit_length()
        if _torch_is_faster(keys, key.shape[-1], is_causal, trains, torch.get_num_threads()):
            y = target(query, key, value, *options, scale=scale, enable_gqa=enable_gqa)
            return y.to(DTYPES[out_type])
    return attention_bf16(target, out_type, query, key, value, *options, scale, enable_gqa)


@cache
def _torch_is_faster(keys: int, width: int, is_causal: bool, trains: bool, threads: int) -> bool:
    """Return whether torch's attention kernel is faster, timed on some heads of these lengths.

    Times forward, and backward too if the call `trains`.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    heads = min(max(2, _TIMED_SCORES // keys**2), 64)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(trains):
        operands = [torch.randn(1, heads, keys, width).bfloat16().requires_grad_() for _ in range(3)]
        gradient = torch.randn(1, heads, keys, width).bfloat16()

        def seconds(kernel: Callable[..., Tensor]) -> float:
            def run() -> None:
                y = kernel(*operands, is_causal=is_causal)
                if trains:
                    torch.autograd.grad(y, operands, gradient)

            run()
            return least_s(run)

        return seconds(attend) < seconds(partial(attention_bf16, attend, "bf16"))


class _Bf16Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
        dtype: torch.dtype,
    ) -> Tensor:
        heads = _Heads((query, key, value), mask, None, options)
        if options.dropout_p:
            # Drawn in torch's order and number: FP32 and BF16 drop the same weights.
            heads.noise = draw_kept(heads.scores_shape, options.dropout_p, query.device)
        q, _, v = heads.matrices
        y = v.new_empty((heads.count, q.shape[1], v.shape[2]))
        sums = torch.empty((heads.count, q.shape[1]), dtype=torch.float32)
        for block in heads.blocks():
            some, rows, keys = block
            weights, sums[some, rows] = softmax(heads.scores(block))
            torch.bmm(weights, _part(v, some, keys), out=_part(y, some, rows))
        y = heads.in_torch_order(y, y.dtype)
        ctx.save_for_backward(query, key, value, mask, heads.noise, y, sums)
        ctx.options = options
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *operands, mask, noise, y, sums = ctx.saved_tensors
        heads = _Heads(operands, mask, noise, ctx.options)
        q, k, v = heads.matrices
        gradient = gradient.to(y.dtype)
        means = (gradient.float() * y).sum(-1).view(heads.count, -1)
        g = gradient.reshape(heads.count, *y.shape[-2:])
        dq, dk, dv = torch.empty_like(q), heads.gradient_total(k), heads.gradient_total(v)
        d_mask = q.new_empty((heads.count, *heads.scores_shape[-2:])) if ctx.needs_input_grad[3] else None
        for block in heads.blocks():
            some, rows, keys = block
            q_part, g_part = _part(q, some, rows), _part(g, some, rows)
            k_part, v_part = _part(k, some, keys), _part(v, some, keys)
            weights, d_scores = softmax_gradient(
                heads.scores(block), sums[some, rows], means[some, rows], torch.bmm(g_part, v_part.mT)
            )
            if d_mask is not None:
                d_mask[some, rows, keys] = d_scores
            _add_product(_part(dq, some, rows), d_scores, k_part, ctx.options.scale)
            _add_product(_part(dk, some, keys), d_scores.mT, q_part, ctx.options.scale)
            _add_product(_part(dv, some, keys), weights.mT, g_part)
        if d_mask is not None:
            d_mask = d_mask.view(heads.scores_shape).sum_to_size(mask.shape).to(mask.dtype)
        found = (
            heads.operand_gradient(d, t.shape, t.dtype) for d, t in zip((dq, dk, dv), operands, strict=True)
        )
        return *found, d_mask, None, None


class _Block(NamedTuple):
    """A block of scores: some heads, some rows, and the keys visible to these rows."""

    heads: slice
    rows: slice
    keys: slice


class _Heads(Heads):
    """The scores of BF16 operands, computed block by block."""

    def __init__(
        self, operands: Sequence[Tensor], mask: Tensor | None, noise: Tensor | None, options: AttentionOptions
    ) -> None:
        super().__init__(operands, mask, options.grouped)
        self.matrices = [self.per_head(j, operand) for j, operand in enumerate(operands)]
        self._options, self.noise = options, noise
        length, positions = self.scores_shape[-2:]
        most = _CAUSAL_ROWS if options.is_causal else length
        self._rows = max(min(length, most, SCORES_PER_BLOCK // positions), 1)
        # Inf - Inf gives NaN; the product itself may be -Inf, which has a softmax.
        q, k = (t.sum(dtype=torch.float32) for t in self.matrices[:2])
        self._finite = bool((q + k).isfinite())

    def blocks(self) -> Iterator[_Block]:
        """Yield blocks that cover all scores, each score once."""
        length, positions = self.scores_shape[-2:]
        step = max(SCORES_PER_BLOCK // (self._rows * positions), 1)
        for head in range(0, self.count, step):
            for row in range(0, length, self._rows):
                end = min(row + self._rows, length)
                last = min(end, positions) if self._options.is_causal else positions
                yield _Block(slice(head, min(head + step, self.count)), slice(row, end), slice(0, last))

    def scores(self, block: _Block) -> Scores:
        """Return the scores of a block."""
        some, rows, keys = block
        q, k = _part(self.matrices[0], some, rows), _part(self.matrices[1], some, keys).mT
        high = torch.bmm(q, k)
        low = torch.baddbmm(high, q, k, beta=-1) if self._finite else torch.zeros_like(high)
        mask = self.mask(some)
        if mask is not None:
            mask = mask[:, rows] if mask.shape[1] > 1 else mask
            mask = mask[..., keys] if mask.shape[2] > 1 else mask
            mask = mask.to(high.dtype).expand(high.shape).contiguous()
        kept = None
        if self.noise is not None:
            noise = self.noise.view(self.count, *self.scores_shape[-2:])
            kept = noise[some, rows, keys].to(torch.int16).neg_()
        p, first = self._options.dropout_p, rows.start if self._options.is_causal else self.scores_shape[-1]
        return Scores(high, low, mask, self._options.scale, first, kept, 1 / (1 - p) if p < 1 else 0.0)

    def gradient_total(self, matrix: Tensor) -> Tensor:
        """Allocate a gradient that every block of rows adds to: in FP32 for several blocks."""
        several = self._rows < self.scores_shape[-2]
        return torch.zeros_like(matrix, dtype=torch.float32) if several else torch.empty_like(matrix)


def _part(matrices: Tensor, some: slice, rows: slice) -> Tensor:
    """Return some rows of some heads; one head as a dense batch, which torch does not copy."""
    part = matrices[some, rows]
    return part[0].unsqueeze(0) if len(part) == 1 else part


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """Add factor a b to an FP32 sum; overwrite a BF16 result with it."""
    if total.dtype is torch.float32:
        total.add_(torch.bmm(a, b), alpha=factor)
    else:
        torch.baddbmm(total, a, b, beta=0, alpha=factor, out=total)

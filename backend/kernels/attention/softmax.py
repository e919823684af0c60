"""Passes over attention scores: softmax, dropout, rounding, and the gradient.

Each function has a plain body, which reads like its equation, and a compiled one, which takes one pass
over memory (`qsync.backend.casts.tvm.attention`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qsync.backend.casts.cast_ops import compiled_for
from qsync.backend.casts.tvm.constants import SOFTMAX_UNITS


class Scores(NamedTuple):
    """Scores (high + low) factor + mask of some rows of some heads, and their dropout.

    high, low and mask (heads, rows, keys) are in BF16; row i sees the keys up to first + i. `kept` is
    INT16: -1 for a weight that dropout keeps, 0 for a dropped one (None: all are kept). `keep_factor` is
    1 / (1 - p).
    """

    high: Tensor
    low: Tensor
    mask: Tensor | None
    factor: float
    first: int
    kept: Tensor | None
    keep_factor: float


def softmax(scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the BF16 weights D P of scores S, and each row's FP32 log sum exp(S) (heads, rows).

    P is the softmax of S, and D = keep / (1 - p). A row that a mask hides entirely has weights of 0, as in
    torch, and the sum Inf.
    """
    high = scores.high
    library = compiled_for("softmax", high, (torch.bfloat16,))
    if library is None:
        values = _values(scores)
        sums = values.logsumexp(-1)
        weights = (values - sums.unsqueeze(-1)).exp_()
        if scores.mask is not None and (hidden := sums == -math.inf).any():
            weights.masked_fill_(hidden.unsqueeze(-1), 0.0)
            sums.masked_fill_(hidden, math.inf)
        return _dropped(weights.mul_(scores.keep_factor).bfloat16(), scores), sums
    weights, rows = torch.empty_like(high), high.shape[:2]
    largest, total = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int64)
    library[f"softmax{_variant(scores)}"](*_arguments(scores), weights, largest, total)
    sums = total.float().mul_(1.0 / SOFTMAX_UNITS).log_().masked_fill_(total == 0, math.inf)
    return _dropped(weights, scores), sums.add_(largest.view(torch.float32))


def softmax_gradient(scores: Scores, sums: Tensor, means: Tensor, d_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute the weights D P, and compute the scores' gradient dS = P (D dW - means), in BF16.

    `sums` are those of `softmax`. `d_weights` is the gradient of D P in BF16, and is overwritten. means
    (heads, rows) are the sums of P D dW over rows.
    """
    library = compiled_for("softmax", scores.high, (torch.bfloat16,))
    _dropped(d_weights, scores)
    if library is None:
        weights = (_values(scores) - sums.unsqueeze(-1)).exp_()
        # Widened before the subtraction: the softmax's gradient is a difference of close numbers.
        d_scores = d_weights.float().mul_(scores.keep_factor).sub_(means.unsqueeze(-1)).mul_(weights)
        weights = weights.mul_(scores.keep_factor).bfloat16()
        return _dropped(weights, scores), d_scores.bfloat16()
    weights = torch.empty_like(scores.high)
    name = f"softmax_gradient{_variant(scores)}"
    library[name](*_arguments(scores), sums.contiguous(), means.contiguous(), weights, d_weights)
    return _dropped(weights, scores), d_weights


def _values(scores: Scores) -> Tensor:
    values = (scores.high.float() + scores.low).mul_(scores.factor)
    if scores.mask is not None:
        values.add_(scores.mask)
    rows, keys = values.shape[1:]
    if scores.first + 1 < keys:
        later = torch.ones(rows, keys, dtype=torch.bool).triu_(scores.first + 1)
        values.masked_fill_(later, -math.inf)
    return values


def _dropped(values: Tensor, scores: Scores) -> Tensor:
    """Zero the BF16 values that dropout drops, in place."""
    if scores.kept is not None:
        values.view(torch.int16).bitwise_and_(scores.kept)
    return values


def _variant(scores: Scores) -> str:
    return "" if scores.mask is None else "_masked"


def _arguments(scores: Scores) -> tuple[object, ...]:
    """Return the first arguments of both compiled softmax programs."""
    mask = scores.high if scores.mask is None else scores.mask
    workspace = torch.empty(scores.high.shape[2], dtype=torch.float32)
    return scores.high, scores.low, mask, scores.factor, scores.first, scores.keep_factor, workspace

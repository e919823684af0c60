"""BF16 linear layers whose weight gradient is computed from transposed copies where faster.

dW = g' x has a transposed first operand. With AMX oneDNN multiplies it at half its rate or less (torch 2.13),
so copying it into the other order pays. ms of dW as torch computes it and from copies, one thread of a Xeon
6: 6.2 and 4.5 for 1024x768x3072, 35 and 19 for 2048x1024x4096.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend import shape_choices
from qsync.backend.autograd import differentiable, once_differentiable
from qsync.backend.casts.cast_ops import sum_columns, transpose_last
from qsync.backend.devices.amx import has_amx
from qsync.backend.kernel_cache import rounded_up
from qsync.backend.sixteen_bit_operands import as_matrix

# Below this many multiply-adds the products take less time than the overhead of these kernels.
_MIN_MULTIPLIES = 2**24
_MOST_COPIED = 2**24  # elements in copies: a workspace of 32 MiB
_MOST_TIMED = 2**26  # elements of a timed operand: trials need memory beside the model's


def linear_bf16(
    target: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute a BF16 linear layer y = x W' + b; x (..., K), W (N, K), b (N).

    >>> linear_bf16(F.linear, x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    """
    if not _pays(input, weight, weight.shape[0]):
        return target(input, weight, bias)
    y = differentiable(_Product, target, as_matrix(input), weight, bias, False)
    return y.view(*input.shape[:-1], len(weight))


def addmm_bf16(
    target: Callable[..., Tensor],
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Compute addmm(b, x, W) in BF16, W stored (K, N), b (N); torch's if alpha or beta is not 1.

    >>> addmm_bf16(torch.addmm, bias, x, weight)
    """
    is_plain = alpha == beta == 1 and input.shape == mat2.shape[1:]
    if not is_plain or not _pays(mat1, mat2, mat2.shape[1]):
        return target(input, mat1, mat2, beta=beta, alpha=alpha)
    return differentiable(_Product, target, mat1, mat2, input, True)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a' b (P, Q) of a (M, P) and b (M, Q), directly or from copies, whichever is faster.

    >>> transposed_product(gradient, x)
    """
    are_dense = a.is_contiguous() and b.is_contiguous() and a.dtype is b.dtype is torch.bfloat16
    pays = are_dense and has_amx(a.device) and _copies_pay(len(a), a.shape[1], b.shape[1])
    return _from_copies(a, b) if pays else a.t() @ b


def _copies_pay(rows: int, width: int, other: int) -> bool:
    """Return whether a' b of matrices (rows, width) and (rows, other) is faster from transposed copies.

    Each shape is timed once per machine.
    """
    if rows * width * other < _MIN_MULTIPLIES or rows * max(width, other) > _MOST_TIMED:
        return False
    if _num_copied(rows, width, other) > _MOST_COPIED:
        return False
    exact = ("a' b", rows, width, other, torch.get_num_threads())  # an unrounded key, quicker to look up
    number = shape_choices.choices().get(exact, 2)
    if number is None:
        a, b = (torch.ones(rows, size, dtype=torch.bfloat16) for size in (width, other))
        key = ("a' b", *rounded_up((rows, width, other)))
        number = shape_choices.choices().alias(
            exact, shape_choices.choose(key, [lambda: a.t() @ b, lambda: _from_copies(a, b)])
        )
    return number == 1


def _from_copies(a: Tensor, b: Tensor) -> Tensor:
    """Compute a' b from a copy of a', or as (b' a)' from copies of b' and the result: the smaller."""
    if a.numel() == _num_copied(len(a), a.shape[1], b.shape[1]):
        return _transposed(a) @ b
    return _transposed(_transposed(b) @ a)


def _num_copied(rows: int, width: int, other: int) -> int:
    return min(rows * width, (rows + width) * other)


def _transposed(matrix: Tensor) -> Tensor:
    return transpose_last(matrix.unsqueeze(0))[0]


def _pays(x: Tensor, weight: Tensor, width: int) -> bool:
    """Return whether the weight is trained and its gradient is faster from copies."""
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.ndim == 2 and x.ndim > 1):
        return False
    rows = math.prod(x.shape[:-1])
    return x.dtype is torch.bfloat16 and has_amx(x.device) and _copies_pay(rows, x.shape[-1], width)


class _Product(torch.autograd.Function):
    """y = x W + b of matrices; without `is_stored_transposed` W is stored (N, K)."""

    @staticmethod
    def forward(
        ctx: Any,
        target: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_stored_transposed: bool,
    ) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[1:3]
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        ctx.is_stored_transposed = is_stored_transposed
        return target(bias, x, weight) if is_stored_transposed else target(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = gradient.contiguous()
        dx = dw = db = None
        if weight is not None:
            dx = g @ (weight.t() if ctx.is_stored_transposed else weight)
        if x is not None:
            dw = transposed_product(*((x, g) if ctx.is_stored_transposed else (g, x)))
        if ctx.needs_input_grad[3]:
            db = sum_columns(g).to(g.dtype)
        return None, dx, dw, db, None

"""Derivatives of gelu and silu without their input: from eight bits, or from the result.

The derivative from the result is Tempo's (arXiv 2210.10246).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from qsync.backend.block_sizes import SLOPES_PER_BLOCK

# gelu' lies in (-0.1290, 1.1290), silu' in (-0.0998, 1.0998): 256 codes with a step of 0.00494 have an error
# of at most 0.0025.
_LOWEST, _STEP = -0.13, 1.26 / 255
# The x of gelu's minimum (erf, tanh forms), and gelu there.
_MINIMUM = {
    "none": (-0.751791524694493, -0.16997120747990369),
    "tanh": (-0.752461430907263, -0.17004075057125406),
}
_TABLE_ENTRIES = 1 << 15


def minimum(approximate: str) -> tuple[float, float]:
    """Return the x of gelu's minimum, and gelu there."""
    return _MINIMUM[approximate]


_aten = torch.ops.aten
_TIMES_SLOPE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda g, x: _aten.gelu_backward(g, x),
    "tanh": lambda g, x: _aten.gelu_backward(g, x, approximate="tanh"),
    "silu": lambda g, x: _aten.silu_backward(g, x),
}


def derivative_codes(x: Tensor, curve: str) -> Tensor:
    """Encode f'(x) in eight bits, within 0.0025: code = round((f'(x) + 0.13) / 0.00494).

    `curve` is "silu", or gelu's `approximate` in torch ("none", "tanh").

    >>> derivative_codes(torch.tensor([-9.0, 0.0, 9.0]), "none")
    tensor([ 26, 128, 229], dtype=torch.uint8)
    """
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    num_ones = x.numel() if x.is_cuda else min(x.numel(), SLOPES_PER_BLOCK)
    ones = torch.ones(num_ones, dtype=torch.float32, device=x.device)

    def encode(out: Tensor, values: Tensor) -> None:
        # In FP32: rounded to BF16, the largest derivative, 1.129, would exceed the last code.
        slope = _TIMES_SLOPE[curve](ones[: values.numel()], values.float())
        out.copy_(slope.sub_(_LOWEST - _STEP / 2).mul_(1 / _STEP))

    _blockwise(encode, codes, x)
    return codes


def decode_derivative(codes: Tensor, gradient: Tensor) -> Tensor:
    """Multiply the gradient by the derivative that 8-bit codes represent."""
    result = torch.empty(codes.shape, dtype=gradient.dtype, device=codes.device)

    def decode(out: Tensor, values: Tensor, g: Tensor) -> None:
        out.copy_(values.float().mul_(_STEP).add_(_LOWEST).mul_(g.float()))

    _blockwise(decode, result, codes, gradient)
    return result


def derivative_from_output(y: Tensor, right: Tensor, approximate: str) -> Tensor:
    """Return gelu'(x) from y = gelu(x) and `right`: 1 for x right of the minimum, else 0.

        t = +-sqrt(y - min gelu),   gelu'(x) = table[t]

    gelu' is smooth in t, unlike in y, whose slope vanishes at the minimum. A table of 2^15 entries is within
    5e-4 for an FP32 y (the rounding of y next to the minimum), 0.03 for a BF16 one. FP32, or FP64 for an FP64
    y. Overwrites `right`.

    >>> derivative_from_output(torch.tensor([0.0]), torch.tensor([1.0]), "none")
    tensor([0.5000])
    """
    exact = torch.float64 if y.dtype is torch.float64 else torch.float32
    slope = torch.empty(y.shape, dtype=exact, device=y.device)
    table, first, per_step = _derivatives(approximate, y.device)
    least = _MINIMUM[approximate][1]

    def look_up(out: Tensor, values: Tensor, is_right: Tensor) -> None:
        t = values.to(exact).sub(least).clamp_(0).sqrt_().mul_(is_right.mul_(2).sub_(1))
        place = t.sub_(first).mul_(per_step).nan_to_num_().clamp_(0, _TABLE_ENTRIES - 1)
        out.copy_(table.index_select(0, place.int()))

    _blockwise(look_up, slope, y, right)
    return slope


@cache
def _derivatives(approximate: str, device: torch.device) -> tuple[Tensor, float, float]:
    """Return a table of gelu' at each step's middle, the first t, and the steps per unit of t."""
    x = torch.linspace(-14, 9, 1 << 21, dtype=torch.float64)
    y = torch.nn.functional.gelu(x, approximate=approximate)
    slope = _TIMES_SLOPE[approximate](torch.ones_like(x), x)
    at, least = _MINIMUM[approximate]
    t = (y - least).clamp_(0).sqrt_() * torch.where(x >= at, 1.0, -1.0)
    first, last = float(t[0]), float(t[-1])
    per_step = _TABLE_ENTRIES / (last - first)
    middles = first + (torch.arange(_TABLE_ENTRIES, dtype=torch.float64) + 0.5) / per_step
    nearest = torch.searchsorted(t, middles).clamp_(max=len(t) - 1)
    return slope[nearest].float().to(device), first, per_step


def _blockwise(function: Callable[..., None], out: Tensor, *inputs: Tensor) -> None:
    """Call `function(out, *inputs)` block by block on a CPU, and once on a GPU."""
    flat = [tensor.contiguous().view(-1) for tensor in (out, *inputs)]
    length = max(out.numel(), 1) if out.is_cuda else SLOPES_PER_BLOCK
    for start in range(0, out.numel(), length):
        function(*(tensor[start : start + length] for tensor in flat))

"""Dropout on CPUs with torch's random numbers, drawn 312 at a time.

On processors other than Intel's, torch draws them one by one, 4 ns each: a seventh of a training step of
ELECTRA in BF16 (one thread of a Zen 5). The compiled program draws the same numbers from the same generator,
so every precision drops the same elements. On Intel's processors torch draws other numbers (by MKL), and its
own kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from qsync.backend.autograd import differentiable
from qsync.backend.casts.cast_ops import COMPILED_DTYPES, compiled_for
from qsync.backend.casts.compiled_casts import Library
from qsync.backend.casts.tvm.constants import TWISTER_WORDS

# Below this many elements, reading and writing the generator's state takes as long as torch's draws.
_MIN_ELEMENTS = 2**13
_PROGRAMS = {dtype: f"dropout_{name}" for dtype, name in COMPILED_DTYPES.items()}
_PROGRAMS[torch.uint8] = "draw_kept"
# Layout of the generator's state: words left plus one (INT32), index of the next word, and all words (INT64).
_LEFT, _NEXT, _WORDS = 2, 2, slice(3, 3 + TWISTER_WORDS)


def dropout(
    target: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> Tensor:
    """Compute F.dropout, to the bit: y = D x, dx = D g, with D = keep / (1 - p).

    `target` is F.dropout or torch.dropout; it runs calls that the compiled program does not support. Saves D
    in the input's type, as torch does on CPUs.

    >>> dropout(F.dropout, x, 0.1)
    """
    library = _library(input) if training and train is not False and not inplace and 0 < p < 1 else None
    if library is None:
        options = {"inplace": inplace} if train is None else {}
        return target(input, p, training if train is None else train, **options)
    return differentiable(_Dropout, input, p, library)


def draw_kept(shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """Draw a mask of bytes, 0 with probability p, else 1, from torch's default generator.

    >>> kept = draw_kept(scores.shape, 0.1, scores.device)
    """
    kept = torch.empty(shape, dtype=torch.uint8, device=device)
    library = _library(kept) if 0 < p < 1 else None
    if library is None:
        return kept.bernoulli_(1 - p)
    _draw(library, kept, 1 - p, kept, kept, torch.default_generator)
    return kept


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, library: Library) -> Tensor:
        noise, y = torch.empty_like(x), torch.empty_like(x)
        _draw(library, x.detach(), 1 - p, noise, y, torch.default_generator)
        ctx.save_for_backward(noise)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None


def _library(x: Tensor) -> Library | None:
    """Return the compiled program for a tensor, if it exists and draws torch's numbers."""
    if x.device.type != "cpu" or x.numel() < _MIN_ELEMENTS or type(x) not in (Tensor, torch.nn.Parameter):
        return None
    library = compiled_for("dropout", x, tuple(_PROGRAMS))
    draws = library is not None and not is_functorch_wrapped_tensor(x) and _draws_as_torch()
    return library if draws else None


@cache
def _draws_as_torch() -> bool:
    """Return whether the compiled program draws torch's numbers and leaves torch's generator state."""
    library = compiled_for("dropout", torch.ones(1, dtype=torch.float32))
    found = []
    for is_compiled in (True, False):
        generator = torch.Generator().manual_seed(0)
        torch.empty((), dtype=torch.int32).random_(generator=generator)  # makes the start odd
        kept = torch.empty(3 * TWISTER_WORDS, dtype=torch.uint8)
        if is_compiled and library is not None:
            _draw(library, kept, 0.9, kept, kept, generator)
        else:
            kept.bernoulli_(0.9, generator=generator)
        found.append(torch.cat([kept, generator.get_state()]))
    return torch.equal(*found)


def _draw(
    library: Library, x: Tensor, keep: float, noise: Tensor, y: Tensor, generator: torch.Generator
) -> None:
    """Fill `noise`, and `y` with x times it, from a generator's next random numbers."""
    state = generator.get_state()
    integers = state.view(torch.int64)
    start = TWISTER_WORDS + 1 - int(state.view(torch.int32)[_LEFT])
    words = integers[_WORDS].clone()  # a compiled program requires aligned memory
    block, tempered = (torch.empty(TWISTER_WORDS + more, dtype=torch.uint32) for more in (0, 2))
    factor = 1.0 if x.dtype is torch.uint8 else _factor(keep, x.dtype)
    limit = math.ceil(keep * 2**53)  # a 53-bit number below it keeps its element
    flat = [tensor.view(-1) for tensor in (x, noise, y)]
    library[_PROGRAMS[x.dtype]](words, start, limit, factor, block, tempered, *flat)
    # An odd start leaves the first word of a pair in the block before.
    last = ((start + 1) // 2 + x.numel() - 1) % (TWISTER_WORDS // 2)
    following = 2 * last + 2 - start % 2
    integers[_WORDS], integers[_NEXT] = words, following
    state.view(torch.int32)[_LEFT] = TWISTER_WORDS + 1 - following
    generator.set_state(state)


@cache
def _factor(keep: float, dtype: torch.dtype) -> float:
    """Return the factor by which torch scales a kept element."""
    return float(torch.ones(1, dtype=dtype).div_(keep))

"""Random calls with the shapes that operators have in models, from which samples are chosen."""

from __future__ import annotations

import math
import random

from qsync.predictor.cost_model.op_calls import Argument, Call
from qsync.records.graph import num_elements

_MAX_ELEMENTS = 2**22  # largest tensor
_FOLLOWING = (
    "relu", "gelu", "silu", "softmax", "dropout", "layer_norm", "batch_norm", "add", "mul", "max_pool2d",
)  # fmt: skip


def pool(num: int, seed: int = 0) -> list[Call]:
    """Draw `num` random calls of kinds common in models, with at most 2^22 elements per tensor.

    About a third each are matrix products, convolutions and attention, and following operators. Sizes are
    uniform on a logarithmic scale; widths are mostly multiples of 16, as in models.

    >>> pool(300)
    """
    draw = random.Random(seed)
    found: list[Call] = []
    while len(found) < num:
        call = _draw(draw)
        sizes = (num_elements(call.output), *(argument.num_elements for argument in call.inputs))
        if max(sizes) <= _MAX_ELEMENTS:
            found.append(call)
    return found


def _draw(draw: random.Random) -> Call:
    kind = draw.choice(
        ("linear", "linear", "matmul", "conv2d", "conv2d", "attention", "following", "following")
    )
    if kind == "linear":
        rows, inner, outer = _size(draw, 16, 8192), _width(draw, 16, 4096), _width(draw, 8, 4096)
        weights = (Argument((outer, inner), parameter=True), Argument((outer,), parameter=True))
        return Call(kind, (Argument((rows, inner)), *weights), (rows, outer), 2 * rows * inner * outer)
    if kind == "matmul":
        batch, rows, inner, outer = _size(draw, 1, 64), *(_size(draw, 16, 512) for _ in range(3))
        matrices = (Argument((batch, rows, inner)), Argument((batch, inner, outer)))
        return Call(kind, matrices, (batch, rows, outer), 2 * batch * rows * inner * outer)
    if kind == "attention":
        batch, heads, length = _size(draw, 1, 32), _size(draw, 1, 16), _size(draw, 16, 512)
        width = draw.choice((32, 64, 128))
        shape = (batch, heads, length, width)
        flops = 4 * batch * heads * length * length * width
        return Call(kind, (Argument(shape),) * 3, shape, flops)
    if kind == "conv2d":
        return _convolution(draw)
    return _following(draw, draw.choice(_FOLLOWING))


def _convolution(draw: random.Random) -> Call:
    images, side = _size(draw, 4, 96), draw.choice((2, 4, 7, 8, 14, 16, 28, 32, 56))
    kernel, stride = draw.choice((1, 3, 3, 3, 5)), draw.choice((1, 1, 1, 2))
    inner = draw.choice((3, *(_width(draw, 16, 512) for _ in range(8))))
    outer = _width(draw, 16, 512)
    out = (side + 2 * (kernel // 2) - kernel) // stride + 1
    x, weight, y = (images, inner, side, side), (outer, inner, kernel, kernel), (images, outer, out, out)
    inputs = (Argument(x), Argument(weight, parameter=True))
    return Call("conv2d", inputs, y, 2 * num_elements(y) * inner * kernel * kernel)


def _following(draw: random.Random, kind: str) -> Call:
    if kind in ("batch_norm", "max_pool2d"):
        side = draw.choice((2, 4, 8, 16, 32, 56))
        shape: tuple[int, ...] = (_size(draw, 4, 96), _width(draw, 16, 512), side, side)
    elif kind == "softmax":
        shape = (_size(draw, 1, 32), _size(draw, 1, 16), *(_size(draw, 16, 512),) * 2)
    else:
        shape = (_size(draw, 16, 8192), _width(draw, 16, 4096))
    output = (*shape[:2], shape[2] // 2, shape[3] // 2) if kind == "max_pool2d" else shape
    inputs = (Argument(shape),) * (2 if kind in ("add", "mul") else 1)
    width = shape[1] if kind == "batch_norm" else shape[-1]
    kept = ((width,),) * {"batch_norm": 4, "layer_norm": 2}.get(kind, 0)
    return Call(kind, inputs, output, kept=kept)


def _size(draw: random.Random, least: int, most: int) -> int:
    return round(least * math.exp(draw.random() * math.log(most / least)))


def _width(draw: random.Random, least: int, most: int) -> int:
    """Draw a width, mostly a multiple of 16; one in eight is arbitrary."""
    size = _size(draw, least, most)
    return size if draw.random() < 0.125 else max(16 * round(size / 16), least)

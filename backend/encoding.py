"""Encode tensors in low precision, as 8-bit data with scales or FP16 data, and decode them.

Encoding is not differentiable. A product receives each operand as the pair `Operand(value, encoded)`: the
kernel computes with `encoded`, and returns the gradient to `value`, which it does not save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.casts.cast_ops import (
    CODE_DTYPE,
    LARGEST_CODE,
    nearest_codes,
    quantize_columns,
    quantize_rows,
    quantize_rows_unsigned,
    transpose_last,
)
from qsync.errors import UnsupportedError
from qsync.operators.precision import MX_BLOCK, block_of, code_types, is_encoded

# The exponent of E4M3's largest number; the range, the bias and the NaN of E8M0.
_LARGEST_EXPONENT = 8
_EXPONENTS, _E8M0_BIAS, _E8M0_NAN = (-127, 127), 127, 255
# Elements that are encoded at once, so that FP32 copies stay in the cache and take little memory.
_PASS_ELEMENTS = 2**16


class Encoded:
    """Data of an operand in low precision, which represents `data * scale`.

    `data` is INT8, FP8 or FP16; `scale` is FP32 and broadcasts against `data` (None for FP16), or E8M0, one
    per block of the summed dimension. In layout "col" the data is that of the transposed operand; in layout
    "image" it is UINT8 with zero point 128.
    `packed` belongs to kernels: forms of the data that they make once and reuse as long as the encoding
    lives (a weight is encoded once per optimizer step).
    """

    __slots__ = ("data", "layout", "packed", "scale")

    def __init__(self, data: Tensor, scale: Tensor | None, layout: str) -> None:
        self.data, self.scale, self.layout = data, scale, layout
        self.packed: dict[Any, Any] = {}

    @property
    def code_scale(self) -> Tensor:
        """Return the scale of 8-bit data; raise if there is none."""
        assert self.scale is not None, "FP16 data has no scale"
        return self.scale

    @property
    def num_bytes(self) -> int:
        """Bytes of data and scales, without packed forms."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def __repr__(self) -> str:
        return f"Encoded({tuple(self.data.shape)}, {self.data.dtype}, {self.layout!r})"


class Operand(NamedTuple):
    """A product's operand: the value that receives the gradient, and the data to compute with."""

    value: Tensor
    encoded: Encoded


def encode(tensor: Tensor, type_name: str) -> Encoded:
    """Encode a tensor in a low-precision type, each code the nearest.

        scale = max |x| / c,  code = round(x / scale),  c = 127 (INT8), 448 (E4M3)

    One scale per row of the last dimension ("row": x of shape (..., K) gets (..., 1)), per column of matrices
    ("inner": (..., K, N) gets (..., 1, N)) or of a stored weight ("col": data (N, K), scale (N, 1)), or per
    first index: of a convolution's weight ("channel": (c, 1, 1, 1)) or of its input ("image": (n, 1, 1, 1);
    the codes are unsigned with zero point 128); both lie in channels-last order. A row that holds NaN or Inf
    gets the scale NaN, so everything computed from it is NaN. MXFP8 is encoded by `block_codes`. Raises
    UnsupportedError for a type that is no encoding.

    >>> decode(encode(torch.tensor([[-127.0, 3.2]]), "int8_row"))
    tensor([[-127.,    3.]])
    """
    with torch.no_grad():
        x = tensor.detach()
        if type_name == "fp16":
            return Encoded(x.to(torch.float16), None, "plain")
        form, _, layout = type_name.partition("_")
        if not is_encoded(type_name):
            raise UnsupportedError(
                f"{type_name!r} is no encoding: choose one of {', '.join(code_types())}, fp16"
            )
        if block_of(type_name):
            codes, scale = block_codes(x.t() if layout == "col" else x, _summed(x, layout))
        elif form == "fp8":
            dims = tuple(range(1, x.ndim)) if layout in ("image", "channel") else (-1,)
            dims = (-2,) if layout == "inner" else dims
            codes, scale = nearest_codes((x.t() if layout == "col" else x).float(), dims, form)
        elif layout == "inner" or (layout == "row" and x.ndim > 3):
            codes, scale = _encode_along(x, x.ndim - 1 if layout == "row" else max(x.ndim - 2, 0))
        elif layout == "row":
            codes, scale = quantize_rows(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous())
            codes, scale = codes.view(x.shape), scale.view(*x.shape[:-1], 1)
        elif layout == "col":
            # The products accept any strides, so nothing is transposed.
            codes, scale = quantize_columns(x.contiguous())
            codes, scale = codes.t(), scale.unsqueeze(1)
        elif layout == "channel":
            codes, scale = _encode_channels(x)
        else:
            codes, scale = _encode_images(x)
        return Encoded(codes, scale, layout)


def memory_order(x: Tensor) -> list[int] | None:
    """Return a tensor's dimensions from outermost to innermost in memory; None if not dense."""
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: -strides[d])
    return order if x.permute(order).is_contiguous() else None


def _encode_along(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Encode with one scale along one dimension, in the memory order of x.

    Attention's heads are views of a product's result, and so are transposed matrices. Reordering their
    codes, where a product needs it, moves a quarter of the bytes.
    """
    order = memory_order(x)
    if order is None:
        x, order = x.contiguous(), list(range(x.ndim))
    ordered = x.permute(order)
    axis = order.index(dim)
    outer, length, inner = (
        math.prod(ordered.shape[:axis]),
        ordered.shape[axis],
        math.prod(ordered.shape[axis + 1 :]),
    )
    if inner == 1 or not x.numel():
        codes, scale = quantize_rows(ordered.reshape(outer * inner, length))
    else:
        pairs = [quantize_columns(matrix) for matrix in ordered.reshape(outer, length, inner).unbind()]
        codes, scale = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    back = [order.index(d) for d in range(x.ndim)]
    scales = [1 if d == axis else size for d, size in enumerate(ordered.shape)]
    return codes.view(ordered.shape).permute(back), scale.view(scales).permute(back)


def _encode_channels(w: Tensor) -> tuple[Tensor, Tensor]:
    """Encode a convolution's weight (c, C, ...) as codes in channels-last order.

    Quantizing before reordering moves a quarter of the bytes.
    """
    shape = (len(w), w.shape[1], math.prod(w.shape[2:]))
    if not w.is_contiguous() and w.movedim(1, -1).is_contiguous():
        rows = w.movedim(1, -1).view(shape[0], shape[1] * shape[2])
        codes, scale = quantize_rows(rows)
        last = codes.view(len(w), *w.shape[2:], w.shape[1])
        return last.movedim(-1, 1), scale.view(-1, *[1] * (w.ndim - 1))
    codes, scale = quantize_rows(w.reshape(shape[0], shape[1] * shape[2]).contiguous())
    last = transpose_last(codes.view(shape)).view(len(w), *w.shape[2:], w.shape[1])
    return last.movedim(-1, 1), scale.view(-1, *[1] * (w.ndim - 1))


def _encode_images(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode images (n, C, ...) as unsigned codes in channels-last order, as oneDNN requires."""
    last = x.movedim(1, -1).contiguous()
    codes, scale = quantize_rows_unsigned(last.view(len(x), math.prod(x.shape[1:])))
    return codes.view(last.shape).movedim(-1, 1), scale.view(-1, *[1] * (x.ndim - 1))


def decode(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode an operand, in its original orientation, to FP32 or rounded to `dtype`."""
    if encoded.scale is not None and encoded.scale.dtype is torch.float8_e8m0fnu:
        values = decode_blocks(encoded.data, encoded.scale, _summed(encoded.data, encoded.layout))
    else:
        values = encoded.data.float()
        if encoded.data.dtype is torch.uint8:
            values.sub_(128)
        if encoded.scale is not None:
            values = values.mul_(encoded.scale)
    return (values.t() if encoded.layout == "col" else values).to(dtype)


def block_codes(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Encode in MXFP8: E4M3 codes with one E8M0 scale per block of 32 along `dim`, the summed dimension.

        scale = 2^(floor(log2 max |x|) - 8),  code = e4m3(x / scale), nearest, at most 448

    Source: OCP Microscaling Formats (MX) 1.0, sections 5.2 and 6.3. Where it leaves a choice: ties go to
    even, a block of zeros gets the least scale (2^-127), a block that holds NaN or Inf gets the scale NaN,
    and the last block is shorter if 32 does not divide the dimension. Returns codes of the shape of `values`,
    and scales with ceil(size / 32) entries along `dim`.
    """
    if values.ndim == 0:
        codes, scale = block_codes(values.view(1), 0)
        return codes.view(()), scale
    dim %= values.ndim
    shape = list(values.shape)
    shape[dim] = math.ceil(shape[dim] / MX_BLOCK)
    codes = torch.empty_like(values, dtype=CODE_DTYPE["fp8"])
    scale = torch.empty(shape, dtype=torch.float8_e8m0fnu, device=values.device)
    across = 0 if dim else values.ndim - 1  # another dimension, unless it is a vector
    if values.ndim == 1 or values.numel() <= _PASS_ELEMENTS:
        _encode_blocks(values, dim, codes, scale)
        return codes, scale
    rows = max(1, _PASS_ELEMENTS * values.shape[across] // values.numel())
    for part in zip(*(torch.split(t, rows, across) for t in (values, codes, scale)), strict=True):
        _encode_blocks(part[0], dim, *part[1:])
    return codes, scale


def _encode_blocks(values: Tensor, dim: int, codes: Tensor, scale: Tensor) -> None:
    copy = values.to(torch.float32, copy=True)
    blocks = list(_blocks(copy, dim))
    amax = torch.cat([torch.maximum(b.amax(dim + 1), b.amin(dim + 1).neg_()) for b in blocks], dim)
    exponent = torch.frexp(amax).exponent - (1 + _LARGEST_EXPONENT)
    exponent.clamp_(*_EXPONENTS).masked_fill_(amax == 0, _EXPONENTS[0])
    biased = (exponent + _E8M0_BIAS).masked_fill_(~amax.isfinite(), _E8M0_NAN)
    scale.view(torch.uint8).copy_(biased)
    # 2^-exponent by its bits: E8M0's exponents are FP32's.
    inverse = (_E8M0_BIAS - exponent).bitwise_left_shift_(23).view(torch.float32)
    for block, factor in zip(blocks, _of_blocks(inverse, blocks, dim), strict=True):
        block.mul_(factor)
    # On CPUs torch 2.13's conversion saturates by itself; earlier ones make NaN of what is larger.
    largest = LARGEST_CODE["fp8"]
    codes.copy_(copy.clamp_(-largest, largest))


def decode_blocks(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Decode the codes and scales of `block_codes` to FP32."""
    values = codes.float()
    if values.ndim:
        dim %= values.ndim
        blocks = list(_blocks(values, dim))
        for block, factor in zip(blocks, _of_blocks(scale.float(), blocks, dim), strict=True):
            block.mul_(factor)
    else:
        values.mul_(scale.float()[0])
    return values


def _blocks(values: Tensor, dim: int) -> Iterator[Tensor]:
    """Yield views of the whole blocks, (..., n, 32, ...), and of a shorter last one, (..., 1, rest, ...)."""
    whole, rest = divmod(values.shape[dim], MX_BLOCK)
    yield torch.unflatten(values.narrow(dim, 0, whole * MX_BLOCK), dim, (whole, MX_BLOCK))
    if rest:
        yield values.narrow(dim, whole * MX_BLOCK, rest).unsqueeze(dim)


def _of_blocks(scale: Tensor, blocks: list[Tensor], dim: int) -> list[Tensor]:
    """Return the scales of `_blocks`, to be multiplied by each."""
    parts = torch.split(scale, [block.shape[dim] for block in blocks], dim)
    return [part.unsqueeze(dim + 1) for part in parts]


def _summed(x: Tensor, layout: str) -> int:
    """Return the dimension that a product of this operand sums over: the last, or the one before it."""
    return x.ndim - 2 if layout == "inner" and x.ndim > 1 else x.ndim - 1

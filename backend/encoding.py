"""What a low-precision operand is: 8-bit data with scales, or FP16 data; how tensors get there and back.

Encoding is not differentiable. A product receives each operand as the pair `Operand(value, encoded)`: the
kernel computes with `encoded`, and returns the gradient to `value`, which it does not save.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.errors import UnsupportedError

# The largest magnitude of each 8-bit format: what the largest element of a row is mapped to.
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0, "fp8_gradient": 57344.0}
_CODE_DTYPE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_gradient": torch.float8_e5m2}
# A row of zeros gets this magnitude: its codes are zero, and its scale and the inverse of it are normal FP32
# numbers.
_SMALLEST_AMAX = 1e-35


class Encoded:
    """Data of an operand in low precision: `data * scale` is what it stands for.

    `data` is INT8, FP8 or FP16; `scale` is FP32 and broadcasts against `data` (None for FP16). In layout
    "col" the data is that of the transposed operand. `packed` belongs to kernels: what they make of the data
    once and reuse as long as the encoding lives (a weight is encoded once per optimizer step).
    """

    __slots__ = ("data", "layout", "packed", "scale")

    def __init__(self, data: Tensor, scale: Tensor | None, layout: str) -> None:
        self.data, self.scale, self.layout = data, scale, layout
        self.packed: dict[Any, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of data and scales, packed forms not counted."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def __repr__(self) -> str:
        return f"Encoded({tuple(self.data.shape)}, {self.data.dtype}, {self.layout!r})"


class Operand(NamedTuple):
    """A product's operand: the value it is the gradient of, and the data to compute with."""

    value: Tensor
    encoded: Encoded


def encode(tensor: Tensor, type_name: str) -> Encoded:
    """The tensor in an encoded type; every code is the nearest one.

        scale = max |x| / c,  code = round(x / scale),  c = 127 (INT8), 448 (E4M3)          (ours; symmetric
        absmax)

    One scale per row of the last dimension ("row": x of shape (..., K) gets (..., 1)), per column of a stored
    (K, N) matrix ("col": data (N, K), scale (N, 1)), or per first index ("sample": (n, 1, 1, 1)). A row that
    holds NaN or Inf gets the scale NaN, so whatever is computed from it is NaN. Raises UnsupportedError for a
    type that is no encoding.

    >>> decode(encode(torch.tensor([[-127.0, 3.2]]), "int8_row"))
    tensor([[-127.,    3.]])
    """
    with torch.no_grad():
        if type_name == "fp16":
            return Encoded(tensor.detach().to(torch.float16), None, "plain")
        form, _, layout = type_name.partition("_")
        if form not in _CODE_DTYPE or layout not in ("row", "col", "sample"):
            raise UnsupportedError(
                f"{type_name!r} is no encoding: choose int8_* or fp8_* (row, col, sample), or fp16"
            )
        # BF16 goes through FP32: operations that mix the two are not vectorized (1.37 against 0.08 ms for the
        # product of 1024x384 BF16 with an FP32 column; Zen 5, one thread, torch 2.13).
        values = tensor.detach().float()
        if layout == "col":
            values = values.t()
        dims = tuple(range(1, values.ndim)) if layout == "sample" else (-1,)
        return Encoded(*nearest_codes(values, dims, form), layout)


def nearest_codes(values: Tensor, dims: tuple[int, ...], form: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of FP32 values, each code the nearest, one scale for all of `dims`."""
    scale, inverse = scales(values, dims, LARGEST_CODE[form])
    codes = values * inverse
    # In place: a fresh 4 MB result costs more in page faults than the rounding itself.
    return (codes.round_() if form == "int8" else codes).to(_CODE_DTYPE[form]), scale


def stochastic_codes(values: Tensor, dims: tuple[int, ...], noise: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 codes and scales of FP32 values, rounded up with the probability of how far the lower code is.

    E[code * scale] = values to within scale / 512; E[(code * scale - values)^2] is s^2 / 6 on average over
    the place between two codes, twice that of the nearest code. Overwrites `values`. `noise` is from
    `rounding_noise`.
    """
    scale, inverse = scales(values, dims, LARGEST_CODE["int8"])
    return values.mul_(inverse).add_(noise).round_().to(torch.int8), scale


def rounding_noise(shape: torch.Size, device: torch.device) -> Tensor:
    """Uniform noise in (-1/2, 1/2) on the 256 points (k + 1/2) / 256 - 1/2, from the default generator.

    `torch.rand` draws one number after the other: 5.4 ms for 1024x1536, more than the INT8 product that it
    serves (1.4 ms). Eight bytes from each 64-bit draw take 0.84 ms (Zen 5, one thread, torch 2.13); eight
    bits of noise leave a bias of at most 1/512 of a step, of either sign.
    """
    num_elements = shape.numel()
    draws = torch.empty((num_elements + 7) // 8, dtype=torch.int64, device=device).random_(-(2**63), None)
    return draws.view(torch.int8)[:num_elements].view(shape).float().add_(0.5).mul_(1 / 256)


def scales(values: Tensor, dims: tuple[int, ...], largest: float) -> tuple[Tensor, Tensor]:
    """FP32 scales max|x| / largest over `dims` (kept as 1), NaN where x is not finite; and 1 / scale."""
    if values.numel() == 0:
        shape = [1 if d in dims or d - values.ndim in dims else n for d, n in enumerate(values.shape)]
        return values.new_ones(shape), values.new_ones(shape)
    # Two reductions that write nothing: 0.24 ms for 1024x1536, abs().amax() 0.54 (its temporary costs page
    # faults), and vector_norm(inf) and aminmax, which do not vectorize, 4 to 8 ms (Zen 5, one thread, torch
    # 2.13).
    amax = torch.maximum(values.amax(dims, keepdim=True), values.amin(dims, keepdim=True).neg_())
    amax.clamp_(min=_SMALLEST_AMAX)
    inverse = largest / amax
    # amax - amax is 0 for finite rows and NaN for the others; without it a row with Inf could decode to
    # zeros.
    return amax.mul(1 / largest).add_(amax - amax), inverse


def decode(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the encoded operand stands for, in its original orientation: FP32, or rounded to `dtype`."""
    values = encoded.data.float()
    if encoded.scale is not None:
        values = values.mul_(encoded.scale)
    return (values.t() if encoded.layout == "col" else values).to(dtype)

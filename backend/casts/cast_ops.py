"""Passes over a matrix between products: quantize, dequantize, convert to BF16.

Every function has a plain body, which reads like its equation and runs on every device. It also has a
compiled body (`qsync.backend.casts.tvm.rows`) with the same result. The compiled body runs on CPUs and
NVIDIA GPUs, on dense FP32 and BF16 matrices, where it was measured to be faster than the plain one.

Codes are symmetric: the largest magnitude of a row or column becomes the largest code.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable
from qsync.backend.casts import autotune
from qsync.backend.casts import compiled_casts as compiled
from qsync.backend.casts.autotune import (
    autotuned,
    random_codes,
    random_images,
    random_positive,
    random_values,
)
from qsync.backend.casts.tvm.constants import SMALLEST_AMAX
from qsync.backend.devices.kernel_timing import least_s

# Largest code of each 8-bit format; the largest element of a row maps to it.
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0, "fp8_gradient": 57344.0}
CODE_DTYPE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_gradient": torch.float8_e5m2}
# Below this many elements torch converts to BF16 as fast.
_MIN_COMPILED_TO_BF16 = 2**19
_TRIAL_GEOMETRY: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1])  # stride, padding and dilation
COMPILED_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@autotuned(lambda d: (random_values(d, 4096, 1024),))
def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix (m, n) to the nearest INT8 codes (m, n), with one scale per row (m).

        scale = max |x| / 127,  code = round(x / scale)

    A row that holds NaN or Inf gets the scale NaN.
    """
    library = compiled_for("quantize_rows", values)
    if library is None:
        return _flat(nearest_codes(values.float(), (1,), "int8"))
    codes, scale = torch.empty_like(values, dtype=torch.int8), _empty_scales(len(values), values.device)
    library[f"quantize_rows_{COMPILED_DTYPES[values.dtype]}"](values, codes, scale)
    return codes, scale.view(torch.float32)


@autotuned(lambda d: (random_values(d, 1024, 1024),))
def quantize_columns(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix (m, n) to the nearest INT8 codes (m, n), with one scale per column (n)."""
    library = compiled_for("quantize_columns", values)
    if library is None:
        return _flat(nearest_codes(values.float(), (0,), "int8"))
    columns = values.shape[1]
    codes, scale = torch.empty_like(values, dtype=torch.int8), _empty_scales(columns, values.device)
    inverse = scale.new_empty(library.partial_shape(len(values), columns))
    library[f"quantize_columns_{COMPILED_DTYPES[values.dtype]}"](values, codes, scale, inverse)
    return codes, scale.view(torch.float32)


@autotuned(lambda d: (random_values(d, 32, 64 * 28 * 28),))
def quantize_rows_unsigned(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize_rows`, with zero point 128, as oneDNN's convolutions require."""
    library = compiled_for("quantize_rows_unsigned", values)
    if library is None:
        codes, scale = nearest_codes(values.float(), (1,), "int8")
        return codes.view(torch.uint8).bitwise_xor(128), scale.reshape(-1)
    codes = torch.empty_like(values, dtype=torch.uint8)
    scale = _empty_scales(len(values), values.device)
    library[f"quantize_rows_unsigned_{COMPILED_DTYPES[values.dtype]}"](values, codes, scale)
    return codes, scale.view(torch.float32)


def to_bf16(x: Tensor) -> Tensor:
    """Convert an FP32 tensor of any shape to BF16, differentiably.

    torch's own conversion is as fast while the matrix is small: 0.037 against 0.032 ms for 1024x384, 0.16
    against 0.11 for 1024x1536, 0.36 against 0.23 for 1024x3072 (Zen 5, one thread). On a GPU torch's
    conversion runs, because its launch needs no Python.
    """
    is_large = x.numel() >= _MIN_COMPILED_TO_BF16 and not x.is_cuda
    library = compiled_for("to_bf16", x, (torch.float32,)) if is_large else None
    if library is None:
        return x.to(torch.bfloat16)
    if x.requires_grad and torch.is_grad_enabled():
        return differentiable(_ToBf16, x)
    return _converted(x, library)


class _ToBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        library = compiled_for("to_bf16", x, (torch.float32,))
        return x.to(torch.bfloat16) if library is None else _converted(x, library)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.float()


def _converted(x: Tensor, library: compiled.Library) -> Tensor:
    x = x.detach()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    # Rows of three (a filter's) take nine times as long as rows of 1024.
    width = max(math.gcd(x.numel(), 1024), x.shape[-1])
    size = (x.numel() // width, width)
    library["to_bf16"](x.view(size), out.view(size))
    return out


@autotuned(lambda d: (random_values(d, 32, 64, 28 * 28), torch.bfloat16))
def transpose_last(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy matrices (m, c, p) as (m, p, c), in `dtype` if given."""
    names = {
        (torch.bfloat16, torch.float32): "transpose_to_fp32",
        (torch.int8, torch.int8): "transpose_int8",
        (torch.float32, torch.float32): "transpose_float32",
        (torch.bfloat16, torch.bfloat16): "transpose_bfloat16",
    }
    wanted = dtype or x.dtype
    library = (
        compiled_for("transpose_last", x, tuple(source for source, _ in names))
        if (x.dtype, wanted) in names
        else None
    )
    if library is None:
        return x.transpose(1, 2).to(wanted, memory_format=torch.contiguous_format, copy=True)
    out = x.new_empty((x.shape[0], x.shape[2], x.shape[1]), dtype=wanted)
    library[names[x.dtype, wanted]](x, out)
    return out


@autotuned(lambda d: (random_values(d, 32, 28, 28, 64).bfloat16(), (3, 3), *_TRIAL_GEOMETRY))
def unfold(
    images: Tensor, kernel: tuple[int, int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Copy the windows (n, p, q, kh, kw, C) of images (n, h, w, C), one per output pixel.

    Images are BF16 or INT8 codes; unsigned codes become signed. Pixels outside an image are 0.
    """
    n, h, w, channels = images.shape
    unsigned = images.dtype is torch.uint8
    p, q = (
        (size + 2 * pad - step * (k - 1) - 1) // s + 1
        for size, pad, step, k, s in zip((h, w), padding, dilation, kernel, stride, strict=True)
    )
    names = {torch.uint8: "uint8", torch.int8: "int8", torch.bfloat16: "bfloat16"}
    library = compiled_for("unfold", images, tuple(names))
    if library is None:
        signed = images.view(torch.int8).bitwise_xor(-128) if unsigned else images
        windows = torch.nn.functional.pad(signed, (0, 0, padding[1], padding[1], padding[0], padding[0]))
        for dim in (1, 2):
            extent = dilation[dim - 1] * (kernel[dim - 1] - 1) + 1
            windows = windows.unfold(dim, extent, stride[dim - 1])
        return windows[..., :: dilation[0], :: dilation[1]].permute(0, 1, 2, 4, 5, 3).contiguous()
    out = images.new_empty((n, p, q, *kernel, channels), dtype=torch.int8 if unsigned else images.dtype)
    library[f"unfold_{names[images.dtype]}"](images, *stride, *padding, *dilation, out)
    return out


@autotuned(lambda d: (random_values(d, 32, 28, 28, 3, 3, 64).bfloat16(), (28, 28), *_TRIAL_GEOMETRY))
def fold(
    windows: Tensor, size: tuple[int, int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Sum overlapping BF16 windows (n, p, q, kh, kw, C) into FP32 images (n, h, w, C).

    This is the adjoint of `unfold`.
    """
    n, p, q, kh, kw, channels = windows.shape
    library = compiled_for("fold", windows, (torch.bfloat16,))
    if library is None:
        columns = windows.float().permute(0, 5, 3, 4, 1, 2).reshape(n, channels * kh * kw, p * q)
        images = torch.nn.functional.fold(
            columns, size, (kh, kw), dilation=tuple(dilation), padding=tuple(padding), stride=tuple(stride)
        )
        return images.permute(0, 2, 3, 1)
    out = windows.new_empty((n, *size, channels), dtype=torch.float32)
    library["fold"](windows, *stride, *padding, *dilation, out)
    return out


def depthwise_weight_gradient(
    images: Tensor,
    g: Tensor,
    kernel: tuple[int, int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """Return a depthwise convolution's FP32 weight gradient (C, 1, kh, kw).

    BF16 images (n, h, w, C), gradient g (n, p, q, C), on a CPU. ms by torch and here, 7x7, one thread of a
    Zen 4: 8.3 and 1.1 for 8x96x24x24, 4.8 and 0.2 for 8x384x6x6, 24.0 and 0.04 for 8x768x3x3.
    """
    library = compiled_for("depthwise_weight_gradient", images, (torch.bfloat16,))
    if library is None:
        windows = unfold(images, kernel, stride, padding, dilation)
        sums = torch.einsum("npquvc,npqc->uvc", windows.float(), g.float())
    else:
        sums = images.new_empty((*kernel, images.shape[3]), dtype=torch.float32)
        library["depthwise_weight_gradient"](images, g, *stride, *padding, *dilation, sums)
    return sums.permute(2, 0, 1).contiguous().unsqueeze(1)


@autotuned(lambda d: (random_values(d, 4096, 1024).bfloat16(),))
def sum_columns(g: Tensor) -> Tensor:
    """Return the FP32 sums of the columns of g (m, n): the gradient of a bias."""
    library = compiled_for("sum_columns", g)
    if library is None:
        return g.float().sum(0)
    sums = g.new_empty(g.shape[1], dtype=torch.float32)
    partial = sums.new_empty(library.partial_shape(len(g), g.shape[1]))
    library[f"sum_columns_{COMPILED_DTYPES[g.dtype]}"](g, sums, partial)
    return sums


@autotuned(lambda d: (random_values(d, 4096, 1024), random_positive(d, 1024)))
def round_rows(g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Round g * factors (n) to stochastic INT8 codes (m, n), with one scale per row (m).

    E[code * scale] = g * factors. E[(code * scale - g * factors)^2] is scale^2 / 6, averaged over the
    positions between two codes: twice that of the nearest code. Draws from torch's default generator.
    """
    library = None if _repeats_seeds(g) else compiled_for("round_rows", g)
    if library is None:
        return _flat(_stochastic_codes(g.float() * factors, (1,)))
    codes, scale = torch.empty_like(g, dtype=torch.int8), _empty_scales(len(g), g.device)
    library[f"round_rows_{COMPILED_DTYPES[g.dtype]}"](g, factors, _seed(), codes, scale)
    return codes, scale.view(torch.float32)


@autotuned(lambda d: (random_values(d, 4096, 1024), random_positive(d, 4096)))
def round_columns(g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Round g * factors (m) to stochastic INT8 codes (m, n), with one scale per column (n)."""
    library = None if _repeats_seeds(g) else compiled_for("round_columns", g)
    if library is None:
        return _flat(_stochastic_codes(g.float() * factors.unsqueeze(1), (0,)))
    codes, scale = torch.empty_like(g, dtype=torch.int8), _empty_scales(g.shape[1], g.device)
    inverse = scale.new_empty(library.partial_shape(len(g), g.shape[1]))
    library[f"round_columns_{COMPILED_DTYPES[g.dtype]}"](g, factors, _seed(), codes, scale, inverse)
    return codes, scale.view(torch.float32)


def dequantize_trial(device: torch.device) -> tuple[Any, ...]:
    """Return arguments of ordinary size for `dequantize`."""
    rows, columns, bias = (random_positive(device, size) for size in (4096, 1024, 1024))
    return random_codes(device, 4096, 1024).int(), rows, columns, bias, torch.bfloat16


@autotuned(dequantize_trial)
def dequantize(
    sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return rows (m) * columns (n) * sums + bias (n), as (m, n) in `dtype`.

    rows, columns and bias are in FP32. INT32 sums are overwritten.
    """
    library = compiled_for("dequantize", sums, (torch.int32,)) if dtype in COMPILED_DTYPES else None
    if library is None or (bias is not None and bias.dtype is not torch.float32):
        # Converted in place: 0.07 ms for 1024x1536, against 0.24 ms into fresh memory (page faults; Zen
        # 5, one thread).
        out = sums if sums.dtype is torch.float32 else sums.view(torch.float32).copy_(sums)
        out.mul_(rows.unsqueeze(1)).mul_(columns)
        return (out if bias is None else out.add_(bias)).to(dtype)
    name = "dequantize" if bias is None else "dequantize_biased"
    offsets = columns if bias is None else bias.detach().contiguous()
    if dtype is torch.float32:
        library[f"{name}_float32"](sums, rows, columns, offsets)
        return sums.view(torch.float32)
    out = torch.empty_like(sums, dtype=dtype)
    library[f"{name}_bfloat16"](sums, rows, columns, offsets, out)
    return out


@autotuned(lambda d: (random_codes(d, 4096, 1024), random_positive(d, 4096)))
def decode_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Return BF16 of codes (m, n) * scale (m). Unsigned codes have zero point 128."""
    unsigned = codes.dtype is torch.uint8
    transposed = not codes.is_contiguous() and codes.t().is_contiguous() and not unsigned
    stored = codes.t() if transposed else codes
    library = compiled_for("decode_rows", stored, (torch.int8, torch.uint8))
    if library is None:
        signed = codes.float().sub_(128) if unsigned else codes.float()
        return signed.mul_(scale.unsqueeze(1)).bfloat16()
    out = torch.empty_like(stored, dtype=torch.bfloat16)
    name = "decode_columns" if transposed else "decode_rows_unsigned" if unsigned else "decode_rows"
    library[name](stored, scale, out)
    return out.t() if transposed else out


@autotuned(lambda d: (random_values(d, 4096, 1024),))
def to_bf16_and_sum(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return g (m, n) in BF16, and the FP32 sums of its columns (n): a bias's gradient."""
    library = compiled_for("to_bf16_and_sum", g)
    if library is None:
        return g.bfloat16(), g.float().sum(0)
    out = torch.empty_like(g, dtype=torch.bfloat16)
    sums = g.new_empty(g.shape[1], dtype=torch.float32)
    partial = sums.new_empty(library.partial_shape(len(g), g.shape[1]))
    library[f"to_bf16_and_sum_{COMPILED_DTYPES[g.dtype]}"](g, out, sums, partial)
    return out, sums


@autotuned(lambda d: (random_images(d), random_positive(d, 32), random_positive(d, 64), torch.bfloat16))
def scale_images(y: Tensor, rows: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y * rows (n) + bias (C) for a convolution's result y (n, C, h, w).

    `y` is FP32 in channels-last order, and is overwritten. The result is in FP32 or BF16.
    """
    images, channels = y.shape[:2]
    flat = y.permute(0, 2, 3, 1).reshape(images, math.prod(y.shape[2:]), channels)
    library = compiled_for("scale_images", flat, (torch.float32,)) if dtype in COMPILED_DTYPES else None
    if library is None or (bias is not None and bias.dtype is not torch.float32):
        out = y.mul_(rows.view(-1, 1, 1, 1))
        return (out if bias is None else out.add_(bias.view(-1, 1, 1))).to(dtype)
    offsets = y.new_zeros(channels) if bias is None else bias.detach().contiguous()
    if dtype is torch.float32:
        library["scale_images_float32"](flat, rows, offsets)
        return y
    out = torch.empty_like(flat, dtype=dtype)
    library["scale_images_bfloat16"](flat, rows, offsets, out)
    return out.view(images, *y.shape[2:], channels).permute(0, 3, 1, 2)


def nearest_codes(values: Tensor, dims: tuple[int, ...], form: str) -> tuple[Tensor, Tensor]:
    """Quantize FP32 values in plain torch to nearest codes, with one scale for all of `dims`."""
    scale, inverse = scales(values, dims, LARGEST_CODE[form])
    codes = values * inverse
    # In place: page faults for a fresh 4 MB result cost more than the rounding.
    return (codes.round_() if form == "int8" else codes).to(CODE_DTYPE[form]), scale


def scales(values: Tensor, dims: tuple[int, ...], largest: float) -> tuple[Tensor, Tensor]:
    """Return FP32 scales max|x| / largest over `dims`, NaN for x not finite, and 1 / scale.

    `dims` stay, with size 1.
    """
    if values.numel() == 0:
        shape = [1 if d in dims or d - values.ndim in dims else n for d, n in enumerate(values.shape)]
        return values.new_ones(shape), values.new_ones(shape)
    # Two reductions without a temporary: 0.24 ms for 1024x1536. abs().amax() takes 0.54 (its temporary
    # costs page faults); vector_norm(inf) and aminmax, which do not vectorize, take 4 to 8 (Zen 5, one
    # thread, torch 2.13).
    amax = torch.maximum(values.amax(dims, keepdim=True), values.amin(dims, keepdim=True).neg_())
    # The scale and its inverse stay normal numbers: E5M2, whose largest number is 57344, needs more room.
    amax.clamp_(min=max(SMALLEST_AMAX, largest * torch.finfo(torch.float32).tiny))
    inverse = largest / amax
    # amax - amax is 0 for finite rows and NaN for the others: without it a row with Inf could decode to
    # zeros.
    return amax.mul(1 / largest).add_(amax - amax), inverse


def _empty_scales(size: int, device: torch.device) -> Tensor:
    """Allocate FP32 scales as int32 with the same bits, the type that compiled casts use."""
    return torch.empty(size, dtype=torch.int32, device=device)


def _flat(encoded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return encoded[0], encoded[1].reshape(-1)


def _stochastic_codes(values: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Round stochastically: up with a probability equal to the fraction. Overwrites `values`."""
    scale, inverse = scales(values, dims, LARGEST_CODE["int8"])
    # 127 + u may round up to 128, which wraps to -128 in eight bits.
    codes = values.mul_(inverse).add_(torch.rand_like(values)).floor_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def _seed() -> int:
    return int(torch.randint(2**31, ()))


def _repeats_seeds(matrix: Tensor) -> bool:
    """Return whether a CUDA graph records this call: each replay would reuse a seed from the host."""
    return matrix.is_cuda and torch.cuda.is_current_stream_capturing()


def compiled_for(
    name: str, matrix: Tensor, dtypes: tuple[torch.dtype, ...] = tuple(COMPILED_DTYPES)
) -> compiled.Library | None:
    """Return the compiled casts if they support this matrix and this cast is faster here."""
    if not (matrix.dtype in dtypes and matrix.is_contiguous() and matrix.numel()):
        return None
    if matrix.device.type == "cpu":
        return _library(torch.get_num_threads())
    if matrix.device.type == "cuda" and torch.version.cuda:
        # A GPU's grid has at most 65,535 images, and as many times 256 columns.
        numbered = matrix.shape[-1] <= 2**23 and (matrix.ndim == 2 or len(matrix) < 2**16)
        return autotune.library(name, matrix.device) if numbered else None
    return None


@cache
def _library(num_threads: int) -> compiled.Library | None:
    """Return the compiled casts; None if torch's threads make the plain ones faster.

    The compiled ones run on one thread, as ranks under torchrun do. Plain torch takes about five passes
    over memory, with all of its threads.
    """
    library = compiled.library()
    if library is None or num_threads == 1:
        return library
    values = torch.linspace(-1, 1, 2**20).view(1024, 1024)
    codes, scale = torch.empty_like(values, dtype=torch.int8), _empty_scales(1024, values.device)
    fused = least_s(lambda: library["quantize_rows_float32"](values, codes, scale))
    plain = least_s(lambda: nearest_codes(values, (1,), "int8"))
    return library if fused <= plain else None

"""The kernels to choose from for each product, precision and device.

`qsync.records.kernel_support` gives the reasons for products that no device, or not this hardware,
computes. This module adds the reasons that depend on the build of torch and on this machine's compilers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsync.backend import cutlass
from qsync.backend.devices.onednn import sums_int8_exactly
from qsync.backend.kernels.attention.attention_bf16 import fastest_attention_bf16
from qsync.backend.kernels.attention.attention_int8 import attention_int8
from qsync.backend.kernels.bilinear import bilinear
from qsync.backend.kernels.convolution.convolution_bf16 import conv2d_bf16
from qsync.backend.kernels.convolution.convolution_int8 import (
    conv1d_int8,
    conv2d_int8,
    conv2d_int8_all,
)
from qsync.backend.kernels.convolution.image_order import find_channels_last
from qsync.backend.kernels.embedding import embedding_bf16, embedding_int8
from qsync.backend.kernels.fp8 import addmm_fp8, linear_fp8
from qsync.backend.kernels.fp16_tf32 import conv2d_fp16, product_fp16, product_tf32
from qsync.backend.kernels.fp32 import addmm_fp32, conv2d_fp32, linear_fp32, matmul_fp32
from qsync.backend.kernels.grouped_matmul import grouped_mm_bf16, grouped_mm_fp32
from qsync.backend.kernels.linear import DTYPES, addmm_int8, addmm_int8_all, linear_int8, linear_int8_all
from qsync.backend.kernels.linear_fp16_tf32 import addmm_fp16, addmm_tf32, linear_fp16, linear_tf32
from qsync.backend.kernels.matmul import matmul_int8
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.kernel_support import why_not_multiplied

Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a product: its name and kernel, or the reason why this device has none."""

    name: str
    kernel: Kernel | None
    reason: str | None = None


def direct(target: Kernel, out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Run the original call on operands in their own type, FP32 or BF16 (oneDNN, cuBLAS)."""
    return target(*args, **kwargs).to(DTYPES[out_type])


def direct_images(target: Kernel, out_type: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the original convolution with images and result in channels-last order."""
    return direct(target, out_type, find_channels_last(input)[0], *args, **kwargs)


_INTEGER_KERNELS: dict[tuple[str, Precision], Kernel] = {
    ("linear", Precision.INT8): linear_int8,
    ("linear", Precision.INT8_ALL): linear_int8_all,
    ("addmm", Precision.INT8): addmm_int8,
    ("addmm", Precision.INT8_ALL): addmm_int8_all,
    ("matmul", Precision.INT8): matmul_int8,
    ("attention", Precision.INT8): attention_int8,
}
_CONVOLUTIONS: dict[tuple[str, Precision], Kernel] = {
    ("conv2d", Precision.INT8): conv2d_int8,
    ("conv2d", Precision.INT8_ALL): conv2d_int8_all,
    ("conv1d", Precision.INT8): conv1d_int8,
}
_EMBEDDINGS: dict[Precision, Kernel] = {Precision.BF16: embedding_bf16, Precision.INT8: embedding_int8}
# CPU kernels that choose per shape between torch's own way and a faster one.
FP32_KERNELS: dict[str, Kernel] = {
    "linear": linear_fp32,
    "addmm": addmm_fp32,
    "conv2d": conv2d_fp32,
    "matmul": matmul_fp32,
    "grouped_mm": grouped_mm_fp32,
    "bilinear": bilinear,
}
_FP32_NAMES = {
    "conv2d": "memory order by shape",
    "grouped_mm": "torch, uncleared",
    "bilinear": "two products",
}
_FP16_KERNELS: dict[str, Kernel] = {"linear": linear_fp16, "addmm": addmm_fp16, "conv2d": conv2d_fp16}
_TF32_KERNELS: dict[str, Kernel] = {"linear": linear_tf32, "addmm": addmm_tf32}
_FP8_KERNELS: dict[str, Kernel] = {"linear": linear_fp8, "addmm": addmm_fp8}


def candidates(
    kind: str, precision: Precision, device: torch.device, bitwise: bool = False
) -> tuple[Candidate, ...]:
    """Return the candidates for this product and precision, usable or not, in a fixed order.

    `bitwise` restricts FP32 to torch's own kernels.

    >>> candidates("linear", Precision.INT8, torch.device("cpu"))[0].name
    'int_mm'
    """
    if precision not in PRECISIONS_BY_KIND.get(kind, ()):
        return ()
    if precision is Precision.FP32 and kind in FP32_KERNELS and device.type == "cpu" and not bitwise:
        name = _FP32_NAMES.get(kind, "MKL or oneDNN by shape")
        return Candidate(name, FP32_KERNELS[kind]), Candidate("torch", direct)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    reason = why_not_multiplied(precision, capability)
    found = _torch_candidates(kind, precision, device, reason)
    if device.type == "cuda" and cutlass.serves(kind, precision):
        found += (_cutlass_candidate(kind, precision, device, reason),)
    return found


def _torch_candidates(
    kind: str, precision: Precision, device: torch.device, reason: str | None
) -> tuple[Candidate, ...]:
    if kind == "embedding" and precision is not Precision.FP32:
        return (_candidate("rows rounded", _EMBEDDINGS[precision], reason),)
    if kind == "conv2d" and precision is Precision.BF16 and device.type == "cpu":
        return (_candidate("windows or oneDNN", conv2d_bf16, None),)
    if kind == "bilinear" and precision is Precision.BF16 and device.type == "cpu":
        return (_candidate("two products", bilinear, None),)
    if kind == "grouped_mm" and precision is Precision.BF16 and device.type == "cpu":
        return (_candidate("torch, in blocks of rows", grouped_mm_bf16, None),)
    if kind == "attention" and precision is Precision.BF16 and device.type == "cpu":
        return (_candidate("products in pieces, or torch", fastest_attention_bf16, None),)
    if precision in (Precision.FP32, Precision.BF16):
        is_images = kind == "conv2d" and precision is Precision.BF16
        return (_candidate("torch", direct_images if is_images else direct, reason),)
    if precision is Precision.FP16:
        return (_candidate("torch, scaled", _FP16_KERNELS.get(kind, product_fp16), reason),)
    if precision is Precision.TF32:
        return (_candidate("torch, TF32 allowed", _TF32_KERNELS.get(kind, product_tf32), reason),)
    if precision is Precision.FP8:
        return (_candidate("scaled_mm", _FP8_KERNELS[kind], reason),)
    if (kind, precision) in _CONVOLUTIONS:
        if device.type != "cpu":
            reason = reason or "torch has no INT8 convolution on GPUs"
        name = "windows or oneDNN" if sums_int8_exactly() else "windows or FP32 sums"
        return (_candidate(name, _CONVOLUTIONS[kind, precision], reason),)
    # torch has no batched INT8 product on GPUs: codes are multiplied in 16 bits, and the sums are still
    # exact.
    batched = device.type == "cuda" and kind in ("matmul", "attention")
    name = "int_mm, batches in 16 bits" if batched else "int_mm"
    return (_candidate(name, _INTEGER_KERNELS[kind, precision], reason),)


def _cutlass_candidate(
    kind: str, precision: Precision, device: torch.device, reason: str | None
) -> Candidate:
    if reason is not None:
        return Candidate("cutlass", None, reason)
    kernel, reason = cutlass.kernel(kind, precision, device)
    return Candidate("cutlass", kernel, reason)


def _candidate(name: str, kernel: Kernel, reason: str | None) -> Candidate:
    return Candidate(name, None if reason else kernel, reason)


def device_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions that the device supports, by capability alone."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return tuple(p for p in Precision if why_not_multiplied(p, capability) is None)

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
from qsync.backend.reference_kernels import block_scaled
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


# Names of kernels that choose per shape between torch's own way and a faster one.
_BY_SHAPE, _WINDOWS, _CODES = "MKL or oneDNN by shape", "windows or oneDNN", "windows of codes"
# torch has no batched INT8 product on GPUs: codes are multiplied in 16 bits, and the sums are still exact.
_BATCHES = "int_mm, batches in 16 bits"

_Named = tuple[str, Kernel]
# The kernels of one kind of device, those of any device, and those of any kind of product.
_OF_DEVICE: dict[str, dict[tuple[str, Precision], _Named]] = {
    "cpu": {
        ("linear", Precision.FP32): (_BY_SHAPE, linear_fp32),
        ("addmm", Precision.FP32): (_BY_SHAPE, addmm_fp32),
        ("matmul", Precision.FP32): (_BY_SHAPE, matmul_fp32),
        ("conv2d", Precision.FP32): ("memory order by shape", conv2d_fp32),
        ("grouped_mm", Precision.FP32): ("torch, uncleared", grouped_mm_fp32),
        ("bilinear", Precision.FP32): ("two products", bilinear),
        ("conv2d", Precision.BF16): (_WINDOWS, conv2d_bf16),
        ("grouped_mm", Precision.BF16): ("torch, in blocks of rows", grouped_mm_bf16),
        ("bilinear", Precision.BF16): ("two products", bilinear),
        ("attention", Precision.BF16): ("products in pieces, or torch", fastest_attention_bf16),
        ("attention", Precision.INT8): ("int_mm", attention_int8),
        ("matmul", Precision.INT8): ("int_mm", matmul_int8),
        ("conv1d", Precision.INT8): (_CODES, conv1d_int8),
        ("conv2d", Precision.INT8): (_CODES, conv2d_int8),
        ("conv2d", Precision.INT8_ALL): (_CODES, conv2d_int8_all),
    },
    "cuda": {
        ("conv2d", Precision.BF16): ("torch", direct_images),
        ("attention", Precision.INT8): (_BATCHES, attention_int8),
        ("matmul", Precision.INT8): (_BATCHES, matmul_int8),
    },
}
_OF_ANY_DEVICE: dict[tuple[str, Precision], _Named] = {
    ("linear", Precision.FP16): ("torch, scaled", linear_fp16),
    ("addmm", Precision.FP16): ("torch, scaled", addmm_fp16),
    ("conv2d", Precision.FP16): ("torch, scaled", conv2d_fp16),
    ("linear", Precision.TF32): ("torch, TF32 allowed", linear_tf32),
    ("addmm", Precision.TF32): ("torch, TF32 allowed", addmm_tf32),
    ("linear", Precision.FP8): ("scaled_mm", linear_fp8),
    ("addmm", Precision.FP8): ("scaled_mm", addmm_fp8),
    ("linear", Precision.INT8): ("int_mm", linear_int8),
    ("addmm", Precision.INT8): ("int_mm", addmm_int8),
    ("linear", Precision.INT8_ALL): ("int_mm", linear_int8_all),
    ("addmm", Precision.INT8_ALL): ("int_mm", addmm_int8_all),
    ("embedding", Precision.BF16): ("rows rounded", embedding_bf16),
    ("embedding", Precision.INT8): ("rows rounded", embedding_int8),
    **{
        (kind, Precision.MXFP8): ("emulated", block_scaled(kind))
        for kind, precisions in PRECISIONS_BY_KIND.items()
        if Precision.MXFP8 in precisions
    },
}
_OF_ANY_PRODUCT: dict[Precision, _Named] = {
    Precision.FP32: ("torch", direct),
    Precision.BF16: ("torch", direct),
    Precision.FP16: ("torch, scaled", product_fp16),
    Precision.TF32: ("torch, TF32 allowed", product_tf32),
}
# Kinds with an FP32 kernel of qsync's on CPUs.
REPLACED_IN_FP32 = tuple(kind for kind, precision in _OF_DEVICE["cpu"] if precision is Precision.FP32)


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
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    reason = why_not_multiplied(precision, capability)
    key, of_torch = (kind, precision), _OF_ANY_PRODUCT.get(precision)
    own = _OF_DEVICE[device.type].get(key) or _OF_ANY_DEVICE.get(key)
    if precision is Precision.FP32 and own is not None and of_torch is not None:
        return (*([] if bitwise else [Candidate(*own)]), Candidate(*of_torch))
    named = own or of_torch
    if named is None:
        found = Candidate("torch", None, reason or "torch has no INT8 convolution on GPUs")
    else:
        found = Candidate(_shown(named[0]), None if reason else named[1], reason)
    if device.type == "cuda" and cutlass.serves(kind, precision):
        return found, _cutlass_candidate(kind, precision, device, reason)
    return (found,)


def _shown(name: str) -> str:
    """Return a kernel's name on this machine: oneDNN convolves codes only where it sums them exactly."""
    if name != _CODES:
        return name
    return _WINDOWS if sums_int8_exactly() else "windows or FP32 sums"


def _cutlass_candidate(
    kind: str, precision: Precision, device: torch.device, reason: str | None
) -> Candidate:
    if reason is not None:
        return Candidate("cutlass", None, reason)
    kernel, reason = cutlass.kernel(kind, precision, device)
    return Candidate("cutlass", kernel, reason)


def device_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions that the device supports, by capability alone."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return tuple(p for p in Precision if why_not_multiplied(p, capability) is None)

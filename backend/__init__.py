"""Kernels: the meaning of every precision, and its fastest computation on each device.

`kernel_selection`   choose kernels by capability, correctness and measured time
`kernel_candidates`  the kernels to choose from
`reference_kernels`  every precision in plain torch
`encoding`           operands in low precision
`custom_operators`   lowered operators in torch.library, for torch.export and torch.compile
`int8_products`      INT8 products, scaled or exact
`sixteen_bit_operands`  operands of 16-bit products
`amx`                whether there is AMX, and its tiles
`device_detection`   a rank's device class, and the machine
`measure_peaks`      measured peak rates
`kernel_cache`, `cuda_build`, `build_ahead`  compiled kernels on disk, nvcc, and all at once
`gpu_state`          clocks of GPUs, and what holds them down
`shape_choices`      choose the fastest of several ways to compute a product, once a shape
`shape_checks`       compare convolutions with FP32 once a shape, where oneDNN miscomputes some
`autograd`, `kernel_timing`, `block_sizes`  differentiable calls, short timings, block sizes of CPU kernels
`kernels/`           products and attention
`casts/`             passes over a matrix between products
`compressed_saves/`  operators that save less for backward
`cutlass/`           products of NVIDIA GPUs
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Choice": "kernel_selection",
    "Encoded": "encoding",
    "Kernels": "kernel_selection",
    "Operand": "encoding",
    "decode": "encoding",
    "encode": "encoding",
    "reference_kernel": "reference_kernels",
    "select": "kernel_selection",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    # Lazy, so that what needs no kernels (planning) imports no torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)

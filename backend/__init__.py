"""Kernels: the meaning of every precision, and its fastest computation on each device.

`selection/`         choose kernels by capability, correctness and measured time
`shape_choices`      choose the fastest of several ways to compute a product, once a shape
`reference_kernels`  every precision in plain torch
`encoding`           operands in low precision
`kernels/`           products, attention, convolutions, and what stands between them
`casts/`             passes over a matrix between products
`compressed_saves/`  operators that save less for backward
`cutlass/`           products of NVIDIA GPUs
`devices/`           a device class, AMX, clocks, short timings
`measure_peaks`      measured peak rates of a device
`precisions_that_pay`  which precisions are worth profiling on a device
`custom_operators`   lowered operators in torch.library, for torch.export and torch.compile
`int8_products`      INT8 products, scaled or exact
`sixteen_bit_operands`  type and scale of the operands of 16-bit products
`autograd`           differentiable calls with types
`block_sizes`        block sizes of CPU kernels; no torch
`kernel_cache`       compiled kernels on disk
`cuda_build`         compile with nvcc
`build_ahead`        compile every library of a device before a job does
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Choice": "selection.kernel_selection",
    "Encoded": "encoding",
    "Kernels": "selection.kernel_selection",
    "Operand": "encoding",
    "decode": "encoding",
    "encode": "encoding",
    "reference_kernel": "reference_kernels",
    "select": "selection.kernel_selection",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    # Lazy, so that what needs no kernels (planning) imports no torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)

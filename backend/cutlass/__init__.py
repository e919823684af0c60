"""INT8 and FP16 products on NVIDIA GPUs through CUTLASS, compiled on the machine that runs them.

`linear`, `convolution`  the differentiable kernels
`products`           products of tensors, padded and with the fastest tile
`tuning`             choose tiles by measurement, and keep the choice on disk
`compiled_products`  call the compiled library; `qsync.backend.cuda_build` compiles it
`products.cu`            the C functions, from `gemm.h` and `conv.h` (matrix products, convolutions),
                         `tiles.h` (tiles by architecture), `scaled_output.h` (the epilogue) and `launch.h`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qsync.operators.precision import Precision

__all__ = ["kernel", "serves", "state"]

# The libraries that a kind of product needs in each precision.
_FAMILIES = {
    ("linear", "int8"): ("int8_gemm", "fp16_gemm"),
    ("linear", "int8_all"): ("int8_gemm",),
    ("linear", "fp16"): ("fp16_gemm",),
    ("conv2d", "int8"): ("int8_conv", "fp16_conv"),
    ("conv2d", "fp16"): ("fp16_conv",),
}


def serves(kind: str, precision: Precision) -> bool:
    """Return whether qsync has CUTLASS kernels for a kind of product in a precision.

    >>> serves("conv2d", Precision.INT8)
    True
    """
    return _families(kind, precision) is not None


def kernel(
    kind: str, precision: Precision, device: torch.device
) -> tuple[Callable[..., Tensor] | None, str | None]:
    """Return the CUTLASS kernel for a kind of product on a GPU, or None and the reason.

    The first call on a machine compiles what the kernel needs (a minute or two); later calls load it.

    >>> kernel("linear", Precision.INT8, torch.device("cuda"))
    """
    from qsync.backend import cuda_build
    from qsync.backend.cutlass import compiled_products, convolution, linear

    families = _families(kind, precision)
    if families is None:
        return None, f"CUTLASS is not used for {kind} in {precision}"
    reason = compiled_products.unavailable(cuda_build.architecture(device), families)
    if reason:
        return None, reason
    make = {"linear": linear.linear, "addmm": linear.addmm, "conv2d": convolution.conv2d}[kind]
    return make(precision), None


def state(device: torch.device) -> str:
    """Describe which families of products are built for a GPU, and why others are not.

    >>> state(torch.device("cuda"))
    'int8_gemm, fp16_gemm built for sm_90, cached in /home/me/.cache/qsync/kernels; int8_conv: nvcc failed'
    """
    from qsync.backend import cuda_build
    from qsync.backend.cutlass import compiled_products
    from qsync.backend.kernel_cache import folder

    architecture = cuda_build.architecture(device)
    by_reason: dict[str | None, list[str]] = {}
    for family in cuda_build.FAMILIES:
        by_reason.setdefault(compiled_products.unavailable(architecture, (family,)), []).append(family)
    built = by_reason.pop(None, [])
    built_text = [f"{', '.join(built)} built for sm_{architecture}, cached in {folder()}"] if built else []
    return "; ".join(built_text + [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()])


def _families(kind: str, precision: Precision) -> tuple[str, ...] | None:
    return _FAMILIES.get(("linear" if kind == "addmm" else kind, str(precision)))

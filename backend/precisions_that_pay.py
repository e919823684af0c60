"""Choose the precisions worth profiling on a device, by the rate of its products.

A processor without instructions for a type emulates it: on an AMD EPYC without AVX-512 a linear layer runs at
71 GFLOP/s in FP32, at 4.4 in BF16 and at 2.8 in INT8, casts included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

import torch

from qsync.backend.kernels import fp32
from qsync.backend.measure_peaks import matrix_product
from qsync.backend.shape_choices import choose
from qsync.errors import FormatError, UnsupportedError
from qsync.operators.precision import DEVICE_16BIT, Precision
from qsync.records.base import base_on, bases_of
from qsync.records.cluster import DeviceClass

# A type counts as emulated if its product takes more than this many times FP32's time. An Intel Xeon of 2023
# without AMX multiplies BF16 in hardware at half of FP32's rate.
_EMULATED = 3
_SIDE = 512


def precisions_to_profile(
    device_class: DeviceClass,
    model: torch.nn.Module,
    precisions: Sequence[Precision | str] | None = None,
    base: Precision | None = None,
) -> tuple[Precision, ...]:
    """Return the precisions to profile: the given or default ones, the base and the model's type.

    A plan needs the times of its base and of FP32, even if `precisions` names neither. Raises FormatError if
    `precisions` is empty, UnsupportedError if the class lacks one of them.
    """
    bases = bases_of(device_class.device, device_class.precisions)
    kept = {Precision.FP32, base_on(base, bases)} if base else set()
    if precisions is not None:
        named = {Precision.parse(p) for p in precisions}
        if not named:
            raise FormatError("precisions is empty; name at least one, or leave it out")
        chosen = tuple(p for p in Precision if p in named | kept)
    else:
        if any(parameter.dtype is torch.bfloat16 for parameter in model.parameters()):
            kept.add(Precision.BF16)
        chosen = default_precisions(device_class, kept)
    for precision in chosen:
        if precision not in device_class.precisions:
            known = ", ".join(device_class.precisions)
            raise UnsupportedError(
                f"device class {device_class.name} does not support {precision}; choose from {known}"
            )
    return chosen


def default_precisions(device_class: DeviceClass, kept: Collection[Precision] = ()) -> tuple[Precision, ...]:
    """Return the precisions worth profiling on a class: those in hardware, and those in `kept`.

    `int8_all` (INT8 in all three products) rounds gradients stochastically, which changes training more than
    users expect: it is profiled on request only. `int8` multiplies backward in 16 bits. The class must be
    this rank's own device: a CPU's products are timed, once per machine.
    """
    unwanted = {p for p in Precision if p.facts.on_request}
    if device_class.device == "cpu":
        unwanted |= emulated_precisions(torch.device("cpu"))
    return tuple(p for p in device_class.precisions if p not in unwanted or p in kept)


def emulated_precisions(device: torch.device) -> frozenset[Precision]:
    """Return the precisions whose products a CPU emulates; none on GPUs.

    FP16 on a CPU is emulated, at a tenth of FP32's speed.

    >>> Precision.FP16 in emulated_precisions(torch.device("cpu"))
    True
    """
    if device.type != "cpu":
        return frozenset()
    slow = {name for name in ("bf16", "int8") if not _is_faster(name, than=_EMULATED)}
    slow |= {DEVICE_16BIT} if "bf16" in slow else set()
    return frozenset(
        p for p in Precision if "cpu" in p.facts.emulated_on or not slow.isdisjoint(p.facts.products)
    )


def emulation_note(device: torch.device) -> str:
    """Return a sentence about the precisions that a device emulates; empty if every CPU emulates them."""
    emulated = emulated_precisions(device)
    if all(device.type in p.facts.emulated_on for p in emulated):
        return ""
    return (
        f"this processor has no fast products in {', '.join(sorted(emulated))}, which are considered on "
        "request only (precisions=[...])"
    )


def sixteen_bits_pay(device: torch.device) -> bool:
    """Return whether the device multiplies 16-bit floats faster than FP32; timed once per machine.

    Many processors do not: without AMX an Intel Xeon of 2023 reaches 93 GFLOP/s in BF16 and 172 in FP32.
    Backward in 16 bits then costs as much as INT8 saves forward, so only `int8_all` is faster than FP32.

    >>> sixteen_bits_pay(torch.device("cuda"))
    True
    """
    return device.type != "cpu" or _is_faster("bf16", than=1)


def _is_faster(type_name: str, than: int) -> bool:
    """Return whether a CPU's product in a type takes less than `times` its time in FP32."""

    @cache  # cached only once the answer is known
    def operands() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(_SIDE, _SIDE, generator=generator) for _ in range(2))

    @cache
    def product() -> Callable[[], object]:
        return matrix_product(type_name, *operands())

    def in_fp32() -> torch.Tensor:
        a, b = operands()
        for _ in range(than - 1):
            fp32.multiply(a, b.t())
        return fp32.multiply(a, b.t())

    runs = [lambda: product()(), in_fp32]
    return choose((f"{type_name} or {than} times FP32",), runs) == 0

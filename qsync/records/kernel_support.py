"""List the precisions that a device, or its kernels for a shape, lack, each with its reason.

Everything is computed from records: planning for a GPU, and explaining the plan, need no GPU. Only a profile
knows what a machine lacks (a compiler, a library): see `Profile.refused`.
"""

from __future__ import annotations

from collections.abc import Collection

from qsync.operators.declaration import Role
from qsync.operators.precision import DEVICE_16BIT, Precision
from qsync.operators.registry import PRECISIONS_BY_KIND, PRODUCTS
from qsync.records.graph import Op, OpGraph


def why_not_multiplied(precision: Precision, capability: tuple[int, int] | None) -> str | None:
    """Return why a device does not support a precision in hardware; None if it does.

    `capability` is a GPU's compute capability, None for a CPU.

    >>> why_not_multiplied(Precision.BF16, (7, 5))
    'needs compute capability 8.0, this GPU has 7.5'
    """
    if capability is None:
        return precision.facts.not_on_cpu
    least = precision.facts.capability
    if capability >= least:
        return None
    return f"needs compute capability {least[0]}.{least[1]}, this GPU has {capability[0]}.{capability[1]}"


def unsupported_by_shape(graph: OpGraph, device: str) -> dict[str, dict[str, str]]:
    """Map operator -> precision -> reason why this kind of device has no kernel for its shape.

    `device` is "cpu" or "cuda". It lists only precisions that the operator's kind otherwise has
    (`PRECISIONS_BY_KIND`).

    >>> unsupported_by_shape(graph, "cpu")["features.3.conv"]
    {'int8_all': 'the windows of grouped convolutions are too short for INT8 products'}
    """
    shapes = {value.name: value.shape for value in graph.inputs}
    shapes |= {op.name: op.shape for op in graph.ops}
    found = {}
    for op in graph.adjustable:
        operands = [shapes[name] for name in op.inputs]
        reasons: dict[str, str] = {}
        for limit in PRODUCTS[op.kind].limits:
            if limit.device == device and (limit.applies is None or limit.applies(operands, op.dilated)):
                reasons.setdefault(str(limit.precision), limit.reason)
        if reasons:
            found[op.name] = reasons
    return found


def precisions_up(precision: Precision, sixteen_bit: str | None) -> list[Precision]:
    """Return a precision followed by its higher alternatives, in the order of preference.

    `sixteen_bit` is the device's 16-bit float between operators; None means FP16.

    >>> precisions_up(Precision.INT8, "bf16")
    [<Precision.INT8: 'int8'>, <Precision.BF16: 'bf16'>, ...]
    """
    up = [sixteen_bit or "fp16" if name == DEVICE_16BIT else name for name in precision.facts.falls_back]
    return [Precision(name) for name in dict.fromkeys((precision, *up, "fp32"))]


def supported_up(
    kind: str, precision: Precision, unsupported: Collection[Precision], sixteen_bit: str | None
) -> list[Precision]:
    """Return the supported precisions for an operator, in order: this one and higher ones.

    An operator runs in the first of them, or in the fastest.

    >>> supported_up("conv1d", Precision.INT8_ALL, [], "bf16")
    [<Precision.INT8: 'int8'>, <Precision.BF16: 'bf16'>, <Precision.FP32: 'fp32'>]
    """
    up = precisions_up(precision, sixteen_bit)
    found = [p for p in up if p in PRECISIONS_BY_KIND[kind] and p not in unsupported]
    return found or [Precision.FP32]


def is_fixed_despite_kernels(op: Op) -> bool:
    """Return whether an operator is fixed although its kind is adjustable (see `Op.fixed_because`)."""
    return op.role is Role.FIXED and op.kind in PRECISIONS_BY_KIND and bool(op.fixed_because)

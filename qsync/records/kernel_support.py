"""In which precisions kernels serve an operator, by its shapes and the kind of device, and why not in others.

Pure, from records: planning for a GPU, and explaining the plan, need no GPU. What a device turns out to lack
(a compiler, a library) is not known here: profiles record it (`Profile.refused`).
"""

from __future__ import annotations

from collections.abc import Collection

from qsync.records.graph import Op, OpGraph, Role
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

# CUTLASS keeps one bit for each row and column of a filter.
LARGEST_FILTER = 32

_SIGNALS = "there is no INT8 convolution of signals on GPUs"
_GROUPED = "CUTLASS has no grouped convolutions"
_DILATED = "CUTLASS has no input gradient of dilated convolutions"

# What is not served of a kind that otherwise is, by kind of device, in words: (kind, precision, why). On CPUs
# oneDNN, or a product of windows, takes every shape (grouped 3.2, dilated 3.4 times as fast as FP32; Zen 5).
LIMITS: dict[str, tuple[tuple[str, Precision, str], ...]] = {
    "cpu": (),
    "cuda": (
        ("conv2d", Precision.INT8, _GROUPED),
        ("conv2d", Precision.INT8, _DILATED),
        ("conv2d", Precision.INT8, f"CUTLASS has no filters longer than {LARGEST_FILTER}"),
    ),
}
# Where a precision goes that is not served, from the next one up; the float is the device's 16-bit one.
_NEXT_UP: dict[Precision, tuple[str, ...]] = {
    Precision.INT8_ALL: ("int8", "float", "fp32"),
    Precision.INT8: ("float", "fp32"),
    Precision.FP8: ("float", "fp32"),
}


def unserved(graph: OpGraph, device: str) -> dict[str, dict[str, str]]:
    """Operator -> precision -> why no kernel of this kind of device ("cpu", "cuda") computes one so shaped.

    Only precisions that the operator's kind has otherwise (`PRECISIONS_BY_KIND`); an operator that is served
    in all of them is left out.

    >>> unserved(graph, "cuda")["features.3.conv"]
    {'int8': 'CUTLASS has no grouped convolutions'}
    """
    if device != "cuda":
        return {}
    shapes = {value.name: value.shape for value in graph.inputs}
    shapes |= {op.name: op.shape for op in graph.ops}
    found = {}
    for op in graph.adjustable:
        reason = _on_gpus(op, [shapes[name] for name in op.inputs])
        if reason:
            found[op.name] = {str(Precision.INT8): reason}
    return found


def unserved_filter(groups: int, dilated: bool, filter_shape: tuple[int, ...]) -> str | None:
    """Why CUTLASS cannot compute a convolution of images like this; None if it can.

    >>> unserved_filter(32, False, (3, 3))
    'CUTLASS has no grouped convolutions'
    """
    if groups != 1:
        return _GROUPED
    if dilated:
        return _DILATED
    if max(filter_shape) > LARGEST_FILTER:
        return f"CUTLASS has no filters of {' x '.join(map(str, filter_shape))}"
    return None


def next_up(kind: str, precision: Precision, refused: Collection[Precision], narrow: str | None) -> Precision:
    """The next precision up, for an operator that is not served in this one.

    `narrow` is the 16-bit float that the device carries along edges; without one it multiplies FP16.

    >>> next_up("conv2d", Precision.INT8, [Precision.INT8], "bf16")
    <Precision.BF16: 'bf16'>
    """
    for name in _NEXT_UP.get(precision, ("fp32",)):
        candidate = Precision((narrow or "fp16") if name == "float" else name)
        if candidate in PRECISIONS_BY_KIND[kind] and candidate not in refused:
            return candidate
    return Precision.FP32


def is_kept_from_lowering(op: Op) -> bool:
    """Whether an operator whose kind has precisions is fixed all the same: `Op.fixed_because` says why."""
    return op.role is Role.FIXED and op.kind in PRECISIONS_BY_KIND and bool(op.fixed_because)


def _on_gpus(op: Op, shapes: list[tuple[int, ...]]) -> str | None:
    if op.kind == "conv1d":
        return _SIGNALS
    if op.kind != "conv2d":
        return None
    image, weight = shapes[:2]
    groups = image[1] // weight[1] if len(image) == 4 and weight[1] else 1
    return unserved_filter(groups, op.dilated, weight[2:])

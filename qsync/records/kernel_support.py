"""List the existing kernels by kind of operator, precision, device and shape, with reasons for the rest.

Everything is computed from records: planning for a GPU, and explaining the plan, need no GPU. Only a profile
knows what a machine lacks (a compiler, a library): see `Profile.refused`.
"""

from __future__ import annotations

from collections.abc import Collection

from qsync.records.graph import Op, OpGraph, Role
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

# Largest filter side: CUTLASS uses one bit per row and column of a filter.
LARGEST_FILTER = 32

_SIGNALS = "there is no INT8 convolution of signals on GPUs"
_GROUPED = "CUTLASS has no grouped convolutions"
_DILATED = "CUTLASS has no input gradient of dilated convolutions"
_FORWARD_ONLY = "the INT8 convolutions of CUTLASS are forward only"
_GROUPED_GRADIENTS = "the windows of grouped convolutions are too short for INT8 products"

# Unsupported shapes of otherwise supported kinds, by device: (kind, precision, reason). On CPUs every shape
# has a kernel (grouped 3.2, dilated 3.4 times as fast as FP32; Zen 5), but gradients of groups have no INT8
# product.
SHAPE_LIMITS: dict[str, tuple[tuple[str, Precision, str], ...]] = {
    "cpu": (("conv2d", Precision.INT8_ALL, _GROUPED_GRADIENTS),),
    "cuda": (
        ("conv2d", Precision.INT8, _GROUPED),
        ("conv2d", Precision.INT8, _DILATED),
        ("conv2d", Precision.INT8, f"CUTLASS has no filters longer than {LARGEST_FILTER}"),
    ),
}
# Least compute capability of tensor cores for each type. TF32 and BF16 came with Ampere, INT8 with Turing
# (Volta's four-byte dot products are no faster than its FP16), FP8 with Ada.
_LEAST_CAPABILITY = {
    Precision.TF32: (8, 0),
    Precision.BF16: (8, 0),
    Precision.INT8: (7, 5),
    Precision.INT8_ALL: (7, 5),
    Precision.FP8: (8, 9),
}
_NO_FP8_CONVOLUTION = "not written; torch has no convolution in FP8"
# Reasons for combinations missing in PRECISIONS_BY_KIND: for a whole kind, or one precision of a kind.
_UNWRITTEN_KINDS = {
    "attention": "not written; torch's fused attention takes 16-bit floats at the least",
    "embedding": "not written; it multiplies nothing",
    **dict.fromkeys(("rnn", "einsum", "grouped_mm"), "not written; only its BF16 form is"),
    **dict.fromkeys(("conv3d", "conv_transpose", "baddbmm"), "not written; its TF32 and 16-bit forms are"),
}
_UNWRITTEN = {
    ("conv2d", Precision.FP8): _NO_FP8_CONVOLUTION,
    ("conv1d", Precision.FP8): _NO_FP8_CONVOLUTION,
    ("conv1d", Precision.INT8_ALL): "not written; the INT8 convolutions of signals are forward only",
    ("matmul", Precision.FP8): "not written; torch._scaled_mm multiplies one pair of matrices, not a batch",
    ("matmul", Precision.INT8_ALL): "not written; without a weight nothing is encoded once and used twice",
}
# Higher precisions to fall back to, in order, below FP32; "16-bit" is the device's 16-bit float.
_ALTERNATIVES: dict[Precision, tuple[str, ...]] = {
    Precision.INT8_ALL: ("int8", "16-bit"),
    Precision.INT8: ("16-bit",),
    Precision.FP8: ("16-bit",),
}


def why_unwritten(kind: str, precision: Precision) -> str:
    """Return why no device has a kernel for a combination missing in `PRECISIONS_BY_KIND`.

    >>> why_unwritten("conv2d", Precision.FP8)
    'not written; torch has no convolution in FP8'
    """
    return _UNWRITTEN.get((kind, precision)) or _UNWRITTEN_KINDS.get(kind, "not written")


def why_not_multiplied(precision: Precision, capability: tuple[int, int] | None) -> str | None:
    """Return why a device does not support a precision in hardware; None if it does.

    `capability` is a GPU's compute capability, None for a CPU.

    >>> why_not_multiplied(Precision.BF16, (7, 5))
    'needs compute capability 8.0, this GPU has 7.5'
    """
    if capability is None:
        if precision is Precision.TF32:
            return "TF32 needs NVIDIA tensor cores"
        return "no CPU multiplies FP8" if precision is Precision.FP8 else None
    least = _LEAST_CAPABILITY.get(precision, (0, 0))
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
        reasons: dict[str, str | None] = {}
        if op.kind in ("conv1d", "conv2d") and device == "cuda":
            reasons[Precision.INT8] = _why_not_on_gpus(op, [shapes[name] for name in op.inputs])
        if op.kind == "conv2d":
            grouped = _groups(*(shapes[name] for name in op.inputs[:2])) > 1
            on_cpus = _GROUPED_GRADIENTS if grouped else None
            reasons[Precision.INT8_ALL] = _FORWARD_ONLY if device == "cuda" else on_cpus
        if any(reasons.values()):
            found[op.name] = {str(precision): why for precision, why in reasons.items() if why}
    return found


def why_not_in_cutlass(groups: int, dilated: bool, filter_shape: tuple[int, ...]) -> str | None:
    """Return why CUTLASS cannot compute a convolution of images with this filter; None if it can.

    >>> why_not_in_cutlass(32, False, (3, 3))
    'CUTLASS has no grouped convolutions'
    """
    if groups != 1:
        return _GROUPED
    if dilated:
        return _DILATED
    if max(filter_shape) > LARGEST_FILTER:
        return f"CUTLASS has no filters of {' x '.join(map(str, filter_shape))}"
    return None


def precisions_up(precision: Precision, sixteen_bit: str | None) -> list[Precision]:
    """Return a precision followed by its higher alternatives, in the order of preference.

    `sixteen_bit` is the device's 16-bit float between operators; None means FP16.

    >>> precisions_up(Precision.INT8, "bf16")
    [<Precision.INT8: 'int8'>, <Precision.BF16: 'bf16'>, ...]
    """
    up = [sixteen_bit or "fp16" if name == "16-bit" else name for name in _ALTERNATIVES.get(precision, ())]
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


def _why_not_on_gpus(op: Op, shapes: list[tuple[int, ...]]) -> str | None:
    if op.kind == "conv1d":
        return _SIGNALS
    return why_not_in_cutlass(_groups(*shapes[:2]), op.dilated, shapes[1][2:])


def _groups(image: tuple[int, ...], weight: tuple[int, ...]) -> int:
    return image[1] // weight[1] if len(image) == 4 and weight[1] else 1

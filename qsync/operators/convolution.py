"""Convolutions of images, signals and volumes, and transposed ones."""

from __future__ import annotations

from typing import Any

from qsync.operators.declaration import Limit, Product, Shape, Shapes, elements
from qsync.operators.precision import FLOATS, Precision

# Largest filter side: CUTLASS uses one bit per row and column of a filter.
LARGEST_FILTER = 32

_OPERANDS = ("input", "weight", "bias")
_NO_FP8 = "not written; torch has no convolution in FP8"
_NO_8_BIT = "not written; its TF32 and 16-bit forms are"


def _flops(shapes: Shapes, result: Shape) -> int:
    return 2 * elements(result) * elements(shapes[1][1:])


def _flops_transposed(shapes: Shapes, result: Shape) -> int:
    """Count one product of every element of the input with the filters of its channel."""
    return 2 * elements(shapes[0]) * elements(shapes[1][1:])


def _is_grouped(shapes: Shapes, dilated: bool) -> bool:
    image, weight = shapes[:2]
    return len(image) == 4 and weight[1] > 0 and image[1] // weight[1] > 1


def _is_dilated(shapes: Shapes, dilated: bool) -> bool:
    return dilated


def _is_long(shapes: Shapes, dilated: bool) -> bool:
    return max(shapes[1][2:], default=0) > LARGEST_FILTER


# On CPUs every shape has a kernel (grouped 3.2, dilated 3.4 times as fast as FP32; Zen 5), but gradients of
# groups have no INT8 product.
_IN_CUTLASS = tuple(
    Limit(device="cuda", precision=Precision.INT8, reason=reason, applies=applies)
    for reason, applies in (
        ("CUTLASS has no grouped convolutions", _is_grouped),
        ("CUTLASS has no input gradient of dilated convolutions", _is_dilated),
        (f"CUTLASS has no filters longer than {LARGEST_FILTER}", _is_long),
    )
)


def _convolution(kind: str, *calls: str, **facts: Any) -> Product:
    return Product(
        kind=kind, calls=dict.fromkeys(calls, _OPERANDS), family="convolution", saves_factors=True,
        saves_both=True, saved=(0,), is_convolution=True, has_module=True, has_bf16_kernel=True,
        reorders=True, **{"flops": _flops, **facts},
    )  # fmt: skip


CONV2D = _convolution(
    "conv2d",
    "conv2d",
    precisions=(*FLOATS, Precision.INT8, Precision.INT8_ALL),
    unwritten=_NO_FP8,
    limits=(
        Limit(
            device="cpu",
            precision=Precision.INT8_ALL,
            reason="the windows of grouped convolutions are too short for INT8 products",
            applies=_is_grouped,
        ),
        *_IN_CUTLASS,
        Limit(
            device="cuda",
            precision=Precision.INT8_ALL,
            reason="the INT8 convolutions of CUTLASS are forward only",
        ),
    ),
    encodings=("image", "channel", None),
    encodings_differ=True,
    batch_dims=3,
)
CONV1D = _convolution(
    "conv1d",
    "conv1d",
    precisions=(*FLOATS, Precision.INT8),
    unwritten=_NO_FP8,
    unwritten_in={Precision.INT8_ALL: "not written; the INT8 convolutions of signals are forward only"},
    limits=(
        Limit(
            device="cuda",
            precision=Precision.INT8,
            reason="there is no INT8 convolution of signals on GPUs",
        ),
    ),
    encodings=("image", "channel", None),
    encodings_differ=True,
    batch_dims=2,
)
CONV3D = _convolution("conv3d", "conv3d", precisions=FLOATS, unwritten=_NO_8_BIT)
CONV_TRANSPOSE = _convolution(
    "conv_transpose",
    *(f"conv_transpose{n}d" for n in (1, 2, 3)),
    flops=_flops_transposed,
    precisions=FLOATS,
    unwritten=_NO_8_BIT,
)

OPERATORS = (CONV2D, CONV1D, CONV3D, CONV_TRANSPOSE)


def why_not_in_cutlass(shapes: Shapes, dilated: bool) -> str | None:
    """Return why CUTLASS cannot compute a convolution of images in INT8; None if it can.

    `shapes` are those of the images and the filters.

    >>> why_not_in_cutlass([(8, 64, 7, 7), (64, 2, 3, 3)], False)
    'CUTLASS has no grouped convolutions'
    """
    return next(
        (limit.reason for limit in _IN_CUTLASS if limit.applies and limit.applies(shapes, dilated)), None
    )

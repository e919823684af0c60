"""Linear layers: y = x W' + b, and torch.addmm's b + x W."""

from __future__ import annotations

from qsync.operators.declaration import Product, Shape, Shapes, elements
from qsync.operators.precision import FLOATS, Precision

_EIGHT_BIT = (Precision.INT8, Precision.INT8_ALL)


def _flops(shapes: Shapes, result: Shape) -> int:
    return 2 * elements(result) * shapes[1][-1]


LINEAR = Product(
    kind="linear",
    calls={"linear": ("input", "weight", "bias")},
    family="product",
    flops=_flops,
    precisions=(*FLOATS, Precision.FP8, *_EIGHT_BIT),
    encodings=("row", "row", None),
    encodings_differ=True,
    saves_factors=True,
    saved=(0,),
    computes_epilogue=_EIGHT_BIT,
    has_module=True,
)
ADDMM = Product(
    kind="addmm",
    calls={"addmm": ("input", "mat1", "mat2")},
    family="product",
    flops=_flops,
    precisions=(*FLOATS, Precision.FP8, *_EIGHT_BIT),
    encodings=(None, "row", "col"),
    encodings_differ=True,
    factors=(1, 2),
    saves_factors=True,
    saved=(1,),
    computes_epilogue=_EIGHT_BIT,
    has_module=True,
)

OPERATORS = (LINEAR, ADDMM)

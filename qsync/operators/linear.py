"""Linear layers: y = x W' + b, and torch.addmm's b + x W."""

from __future__ import annotations

from typing import Any

from qsync.operators.declaration import Product, Shape, Shapes, elements
from qsync.operators.precision import Precision


def _flops(shapes: Shapes, result: Shape) -> int:
    return 2 * elements(result) * shapes[1][-1]


def _linear(kind: str, operands: tuple[str, ...], **facts: Any) -> Product:
    return Product(
        kind=kind, calls={kind: operands}, family="product", flops=_flops,
        precisions=tuple(Precision), encodings_differ=True, saves_factors=True,
        computes_epilogue=(Precision.INT8, Precision.INT8_ALL), has_module=True, **facts,
    )  # fmt: skip


LINEAR = _linear(
    "linear", ("input", "weight", "bias"), encodings=("row", "row", None), saved=(0,),
    axes={"linear": "*k, nk, n -> *n"},
)  # fmt: skip
ADDMM = _linear(
    "addmm", ("input", "mat1", "mat2"), encodings=(None, "row", "col"), factors=(1, 2), saved=(1,),
    axes={"addmm": "mn, mk, kn -> mn"},
)  # fmt: skip

OPERATORS = (LINEAR, ADDMM)

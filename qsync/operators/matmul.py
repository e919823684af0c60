"""Products of two values: matrices, batches, einsum, rows by groups, bilinear layers."""

from __future__ import annotations

from qsync.operators.declaration import Product, Shape, Shapes, elements
from qsync.operators.precision import FLOATS, Precision

_ONLY_BF16 = "not written; only its BF16 form is"


def _flops(shapes: Shapes, result: Shape) -> int:
    return 2 * elements(result) * shapes[0][-1]


def _flops_added(shapes: Shapes, result: Shape) -> int:
    return 2 * elements(result) * shapes[1][-1]


def _flops_bilinear(shapes: Shapes, result: Shape) -> int:
    return 2 * elements(result) * shapes[0][-1] * shapes[1][-1]


MATMUL = Product(
    kind="matmul",
    calls={
        **dict.fromkeys(("matmul", "linalg_matmul", "__matmul__"), ("input", "other")),
        **dict.fromkeys(("bmm", "mm"), ("input", "mat2")),
    },
    family="matmul",
    has_channels=False,
    keeps_order=False,
    flops=_flops,
    precisions=(*FLOATS, Precision.MXFP8, Precision.INT8),
    unwritten_in={
        Precision.FP8: "not written; torch._scaled_mm multiplies one pair of matrices, not a batch",
        Precision.INT8_ALL: "not written; without a weight nothing is encoded once and used twice",
    },
    encodings=("row", "inner"),
    encodings_differ=True,
    saves_factors=True,
    saved=(0, 1),
    axes={"mm": "mk, kn -> mn", "bmm": "bmk, bkn -> bmn"},
)
BADDBMM = Product(
    kind="baddbmm",
    calls={"baddbmm": ("input", "batch1", "batch2")},
    family="matmul",
    flops=_flops_added,
    precisions=FLOATS,
    unwritten="not written; its TF32 and 16-bit forms are",
    factors=(1, 2),
    saves_factors=True,
    saved=(1, 2),
    axes={"baddbmm": "bmn, bmk, bkn -> bmn"},
)
EINSUM = Product(
    kind="einsum",
    calls={"einsum": ()},
    precisions=(Precision.FP32, Precision.BF16),
    unwritten=_ONLY_BF16,
    saves_by_rule=False,  # it is torch's in any precision
    counts_repeats=True,
)
GROUPED_MM = Product(
    kind="grouped_mm",
    calls={"grouped_mm_fallback": ("input", "weight")},  # of transformers; offsets of groups are kept
    family="matmul",
    flops=_flops,
    precisions=(Precision.FP32, Precision.BF16),
    unwritten=_ONLY_BF16,
    saves_factors=True,
    in_autocast=False,
    has_bf16_kernel=True,
    axes=dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), "mk, ekn -> mn"),  # e numbers experts
)

# y_o = x' W_o z: one product of x with all matrices, and one of the results with z.
BILINEAR = Product(
    kind="bilinear",
    calls={"bilinear": ("input1", "input2", "weight", "bias")},
    flops=_flops_bilinear,
    precisions=FLOATS,
    unwritten="not written; its TF32 and 16-bit forms are",
    saved=(0, 1, 2),
    in_autocast=False,
    has_bf16_kernel=True,
    has_module=True,
)

OPERATORS = (MATMUL, BADDBMM, EINSUM, GROUPED_MM, BILINEAR)

"""Attention as one call, and the softmax of attention written out."""

from __future__ import annotations

from qsync.operators.declaration import Product, Shape, Shapes, elements, following
from qsync.operators.precision import FLOATS, Precision


def _flops(shapes: Shapes, result: Shape) -> int:
    query, key, value = shapes[:3]
    return 2 * elements(query[:-1]) * key[-2] * (query[-1] + value[-1])


ATTENTION = Product(
    kind="attention",
    calls={"scaled_dot_product_attention": ("query", "key", "value", "attn_mask")},
    family="attention",
    has_channels=False,
    keeps_order=False,
    flops=_flops,
    backward=2.5,  # five products / two: probabilities are computed again (Dao et al. 2022)
    precisions=(*FLOATS, Precision.INT8),
    unwritten="not written; torch's fused attention takes 16-bit floats at the least",
    encodings=("row", "row", "row", None),
    has_bf16_kernel=True,
    reorders=True,
)
SOFTMAX = following("softmax", has_channels=False, keeps_order=False, saves_less=("plain", "codes"))

OPERATORS = (ATTENTION, SOFTMAX)

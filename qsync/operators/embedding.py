"""Embeddings: rows looked up in a table. They multiply nothing, and read FP32 at every precision."""

from __future__ import annotations

from qsync.operators.declaration import Product
from qsync.operators.precision import Precision

EMBEDDING = Product(
    kind="embedding",
    calls={"embedding": ("input", "weight")},
    precisions=(Precision.FP32, Precision.BF16, Precision.INT8),
    unwritten="not written; it multiplies nothing",
    encodings=(None, None),
    saved=(),
    in_autocast=False,
    reads_fp32=True,
    has_bf16_kernel=True,
)

OPERATORS = (EMBEDDING,)

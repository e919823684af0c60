"""Why qsync has no kernel for a product in a precision, on any device."""

from __future__ import annotations

from qsync.records.precision import Precision

_FORWARD_ONLY = "not written; the INT8 convolutions of oneDNN and CUTLASS are forward only"
_NO_FP8_CONVOLUTION = "not written; torch has no convolution in FP8"
_REASONS = {
    ("conv2d", Precision.FP8): _NO_FP8_CONVOLUTION,
    ("conv1d", Precision.FP8): _NO_FP8_CONVOLUTION,
    ("conv2d", Precision.INT8_ALL): _FORWARD_ONLY,
    ("conv1d", Precision.INT8_ALL): _FORWARD_ONLY,
    ("matmul", Precision.FP8): "not written; torch._scaled_mm multiplies one pair of matrices, not a batch",
    ("matmul", Precision.INT8_ALL): "not written; without a weight nothing is encoded once and used twice",
}
_ATTENTION = "not written; torch's fused attention takes 16-bit floats at the least"
_EMBEDDING = "not written; it multiplies nothing"


def why_absent(kind: str, precision: Precision) -> str:
    """The reason, for a combination that is not in `PRECISIONS_BY_KIND`.

    >>> why_absent("conv2d", Precision.FP8)
    'not written; torch has no convolution in FP8'
    """
    if kind == "attention":
        return _ATTENTION
    if kind == "embedding":
        return _EMBEDDING
    return _REASONS.get((kind, precision), "not written")

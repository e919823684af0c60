"""The scratch memory of oneDNN for BF16 products on one thread, in bytes (measured with torch 2.13)."""

from __future__ import annotations

_FP32 = 4
# The largest scratch memory of a forward product, in bytes.
FORWARD_SCRATCH = 197_632


def weight_gradient_scratch(rows: int, outputs: int, inner: int) -> int:
    """Return oneDNN's scratch bytes for dW = g' x, with g (rows, outputs) and x (rows, inner).

    Blocks have 256 outputs and 1024 inputs. Exact for 20 shapes of at least 512 rows, at most 100 KB too much
    for 8 shapes with fewer rows.
    """
    outputs, inner = min(outputs, 256), min(inner, 1024)
    at_once = (2 * min(rows, 512) + 320) * outputs + 66_688
    in_pieces = (_FP32 * inner + 1088) * outputs + 66_688  # rows in pieces, summed in FP32
    return at_once if rows <= 512 else in_pieces if rows >= 1024 else max(at_once, in_pieces)

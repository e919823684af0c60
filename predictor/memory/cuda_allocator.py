"""The rounding of tensor sizes by torch's caching allocator on GPUs.

A model of c10/cuda/CUDACachingAllocator.cpp; docs/results/gpu.md has its peaks beside those of an
H100. Blocks are multiples of 512 bytes. Those below 1 MiB come out of segments of 2 MiB,
those below 10 MiB out of segments of 20 MiB. Larger ones are segments of their own, rounded to 2 MiB. One
segment of either kind may be nearly empty.
"""

from __future__ import annotations

_BLOCK_BYTES, _LARGE_BYTES, _LARGE_UNIT_BYTES = 512, 10 * 2**20, 2 * 2**20
# One nearly empty segment of either kind.
EMPTY_SEGMENT_BYTES = (2 + 20) * 2**20


def block_bytes(num_bytes: int) -> int:
    """Return the bytes that the allocator takes for a tensor of so many bytes.

    >>> block_bytes(1), block_bytes(11 * 2**20)
    (512, 12582912)
    """
    unit = _LARGE_UNIT_BYTES if num_bytes >= _LARGE_BYTES else _BLOCK_BYTES
    return -(-num_bytes // unit) * unit

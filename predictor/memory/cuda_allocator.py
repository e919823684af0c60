"""The rounding of tensor sizes by torch's caching allocator on GPUs.

This models c10/cuda/CUDACachingAllocator.cpp; docs/results/gpu.md compares its peaks with an H100's. Blocks
are multiples of 512 bytes. Blocks below 1 MiB are parts of segments of 2 MiB, and blocks below 10 MiB
parts of segments of 20 MiB. Larger blocks are segments of their own, rounded up to 2 MiB. One segment of
each shared kind may be nearly empty.
"""

from __future__ import annotations

_BLOCK_BYTES, _LARGE_BYTES, _LARGE_UNIT_BYTES = 512, 10 * 2**20, 2 * 2**20
# One nearly empty segment of each shared size.
EMPTY_SEGMENT_BYTES = (2 + 20) * 2**20


def block_bytes(num_bytes: int) -> int:
    """Return the bytes that the allocator reserves for a tensor of `num_bytes` bytes.

    >>> block_bytes(1), block_bytes(11 * 2**20)
    (512, 12582912)
    """
    unit = _LARGE_UNIT_BYTES if num_bytes >= _LARGE_BYTES else _BLOCK_BYTES
    return -(-num_bytes // unit) * unit

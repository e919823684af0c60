"""What a tensor takes of a GPU's memory: the rules of torch's caching allocator.

A model of c10/cuda/CUDACachingAllocator.cpp, not verified on a GPU: blocks of 512 bytes; below 1 MiB they
come out of segments of 2 MiB, below 10 MiB out of segments of 20 MiB, and larger ones are segments of their
own, rounded to 2 MiB. One segment of either kind may be nearly empty.
"""

from __future__ import annotations

BLOCK, LARGE, ROUNDED = 512, 10 * 2**20, 2 * 2**20
SEGMENTS = (2 + 20) * 2**20


def block_bytes(num_bytes: int) -> int:
    """What the caching allocator of GPUs takes for a tensor of so many bytes.

    >>> block_bytes(1), block_bytes(11 * 2**20)
    (512, 12582912)
    """
    unit = ROUNDED if num_bytes >= LARGE else BLOCK
    return -(-num_bytes // unit) * unit

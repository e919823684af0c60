"""Block sizes of CPU and GPU kernels, shared with the memory model. No torch."""

from __future__ import annotations

# Attention scores per block, 512 KB: a core's share of the cache. All passes over a block run before the next
# block. ms forward and backward of 64 heads of 128x128 in INT8, by scores per block: 2^14: 20.7, 2^16: 15.0,
# 2^17: 14.7, 2^18: 15.9; of 8 heads of 256x256: 4.7, 4.5, 4.0, 6.1 (one thread of a Zen 5; torch in FP32:
# 12.4 and 2.8). With an allocator that keeps freed memory 18.2, 9.7, 8.5, 7.8; of 32 heads of 512x512 38
# each, torch in FP32 83.
SCORES_PER_BLOCK = 2**17
# Attention scores per block on a GPU, 64 MB: large enough to hide the launch of each pass.
_SCORES_PER_GPU_BLOCK = 2**24

# Elements of gelu' and silu' per block: five passes over a block stay in the cache. 4.6 ms for 1024x3072
# against 10.3 in one piece (Zen 5, one thread).
SLOPES_PER_BLOCK = 2**17


def scores_per_block(device: str) -> int:
    """Return the number of attention scores that a kind of device computes per block.

    >>> scores_per_block("cpu")
    131072
    """
    return _SCORES_PER_GPU_BLOCK if device == "cuda" else SCORES_PER_BLOCK

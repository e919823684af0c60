"""Constants that the compiled casts share with their callers; importing them needs no TVM."""

from __future__ import annotations

THREADS_PER_BLOCK = 256  # on a GPU; must be a power of two
# Rows of a column that one thread of a GPU reduces, or that one partial sum of a CPU covers.
ROWS_PER_PART = 64
# Assumed largest magnitude of a row of zeros: its codes are zero, and its scale and the inverse of it are
# normal FP32 numbers.
SMALLEST_AMAX = 1e-35
SOFTMAX_UNITS = 2**30  # integer units per 1 in a softmax's exact sums
TWISTER_WORDS = 624  # 32-bit words in the state of torch's CPU generator
# Rows of an AMX tile, and the pairs of row tiles that stay in the L2 cache at once.
TILE_ROWS = 16
STRIPS = 8

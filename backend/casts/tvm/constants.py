"""Constants that the compiled casts share with their callers; importing them needs no TVM."""

from __future__ import annotations

THREADS_PER_BLOCK = 256  # of a GPU: a power of two
# Rows that are reduced at once where columns are: by one thread of a GPU, or into one partial sum of a CPU.
ROWS_PER_PART = 64
# The largest magnitude that a row of zeros gets: its codes are zero, and its scale and the inverse of it
# are normal FP32 numbers.
SMALLEST_AMAX = 1e-35
SOFTMAX_UNITS = 2**30  # per 1, of the integers that a softmax adds up
TWISTER_WORDS = 624  # of the state of torch's generator on CPUs
# AMX's programs: rows of a tile, and how many pairs of tiles of rows stay in the second cache at once.
TILE_ROWS = 16
STRIPS = 8

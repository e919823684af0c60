"""Sums, means and pools, and interpolation, which is their converse."""

from __future__ import annotations

from qsync.operators.declaration import fixed, following

OPERATORS = (
    following("mean", gradient_by_rows=True),
    fixed("sum", passes_magnitude=True),
    fixed("cumsum", passes_magnitude=True),
    following("avg_pool1d"),
    following("avg_pool2d"),
    following("max_pool1d"),
    following("max_pool2d", is_exact=True),
    following("max_pool3d"),
    following("adaptive_avg_pool1d"),
    following("adaptive_avg_pool2d", gradient_by_rows=True),
    following("adaptive_avg_pool3d"),
    following("interpolate", passes_magnitude=True, is_replaced=True),
)

"""Arithmetic by elements, and calls that put tensors together or choose among them."""

from __future__ import annotations

from qsync.operators.declaration import fixed, following

OPERATORS = (
    following("add", is_elementwise=True, passes_magnitude=True, passes_gradient=2),
    following("sub", is_elementwise=True, passes_magnitude=True, passes_gradient=1),
    following("mul", is_elementwise=True, passes_magnitude=True, counts_repeats=True),
    following("div", "div", "truediv", is_elementwise=True, passes_magnitude=True),
    following("neg", is_elementwise=True, is_exact=True, passes_magnitude=True),
    following("pow", is_elementwise=True),
    following("abs"),
    following("where", is_elementwise=True, is_exact=True, passes_magnitude=True),
    following("masked_fill", is_exact=True, passes_magnitude=True),
    following("cat", "cat", "concat", is_exact=True, passes_magnitude=True),
    following("stack", is_exact=True, passes_magnitude=True),
    following("pad", is_exact=True, passes_magnitude=True),
    following("roll", is_exact=True),
    fixed("exp", passes_magnitude=True),
    fixed("sqrt", passes_magnitude=True),
    fixed("rsqrt", passes_magnitude=True),
)

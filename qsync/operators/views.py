"""Views, copies and changes of type."""

from __future__ import annotations

from typing import Any

from qsync.operators.declaration import fixed, following

_VIEWS = (
    "view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
    "expand_as", "getitem", "chunk", "split", "unbind", "t", "view_as", "reshape_as", "movedim", "narrow",
    "select", "swapaxes",
)  # fmt: skip

# They compute nothing, and may return their input's memory.
_SAME: dict[str, Any] = {
    "may_alias": True, "passes_magnitude": True, "saves_nothing": True, "works_by_rule": True,
}  # fmt: skip
VIEW = following(
    "view",
    *_VIEWS,
    fixed_calls=("broadcast_to",),
    family="view",
    moves_nothing=True,
    keeps_order=False,
    is_exact=True,
    **_SAME,
)
CONTIGUOUS = following("contiguous", keeps_order=False, is_exact=True, **_SAME)
FLOAT = fixed("float", "to", "float", "type_as", "type", **_SAME)
CLONE = following(
    "clone",
    "clone",
    "repeat_interleave",
    "repeat",
    fixed_calls=("tile",),
    is_elementwise=True,
    is_exact=True,
    passes_magnitude=True,
)

OPERATORS = (VIEW, CONTIGUOUS, CLONE, FLOAT)

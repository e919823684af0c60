"""Decide which kernel computes attention on a CPU. No torch. Shared by the kernels and the memory model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version

# Numbers of dimensions that torch's fused CPU attention accepts
_FUSED = (3, 4) if [int(part) for part in version("torch").split(".")[:2]] >= [2, 14] else (4,)
_MOST_SAVED_KEYS = 64  # keys; about a head's width, where a query's weights are as large as the query


def saves_weights(keys: int, dropout_p: float) -> bool:
    """Return whether 16-bit attention saves its weights for backward instead of its result.

    Backward then needs one product instead of three. With dropout it would save the weights twice.
    """
    return keys <= _MOST_SAVED_KEYS and not dropout_p


def torch_fuses(
    query_shape: Sequence[int], value_width: int, dropout_p: float, masks: Iterable[tuple[int, bool]]
) -> bool:
    """Return whether torch's fused CPU attention accepts such operands; its plain one writes all scores.

    A mask is given by its number of dimensions, and whether it has a gradient.
    """
    num = len(query_shape)
    fits = num in _FUSED and query_shape[-1] == value_width and not dropout_p
    return fits and not any(trains or (dims, num) == (3, 4) for dims, trains in masks)

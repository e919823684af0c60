"""Decide which kernel computes attention on a CPU. No torch.

The kernels choose by this module, and the memory model counts bytes by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_SAVED_KEYS = 64  # the width of a head: the weights of a query are as large as the query


def saves_weights(keys: int, dropout_p: float) -> bool:
    """Return whether attention in 16 bits saves its weights for backward, not its result.

    One product in the place of three makes up for the bytes. Dropout would need the weights twice.
    """
    return keys <= _MOST_SAVED_KEYS and not dropout_p


def torch_fuses(
    query_shape: Sequence[int], value_width: int, dropout_p: float, masks: Iterable[tuple[int, bool]]
) -> bool:
    """Return whether torch's fused kernel for CPUs takes such operands; its plain one writes all scores out.

    A mask is its number of dimensions, and whether it has a gradient.
    """
    fits = len(query_shape) == 4 and query_shape[-1] == value_width and not dropout_p
    return fits and not any(dims == 3 or trains for dims, trains in masks)

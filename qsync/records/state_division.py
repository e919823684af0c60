"""Divide an optimizer's state over ranks: which rank holds and updates which parameter. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

BUCKET_BYTES = 25 * 2**20  # of one broadcast of updated weights; two are in flight, with copies of weights
PART = "part"  # key of a state dict: the numbers of those parameters whose state a rank's own part holds


def owners(sizes: Mapping[str, int], parts: Sequence[float]) -> dict[str, int]:
    """Assign each parameter to the rank that lacks most of its part, the largest parameters first.

    `sizes` maps parameters to bytes. `parts` weighs the ranks. Parameters stay whole, so a rank may exceed
    its part by at most one parameter. A rank of weight 0 gets none. The order of parameters does not matter.

    >>> owners({"a": 4, "b": 3, "c": 1}, [3, 1])
    {'a': 0, 'b': 0, 'c': 1}
    """
    per_weight = sum(sizes.values()) / sum(parts)
    lacking = [(-part * per_weight, rank) for rank, part in enumerate(parts)]
    heapq.heapify(lacking)
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lacks, rank = lacking[0]
        heapq.heapreplace(lacking, (lacks + sizes[name], rank))
        found[name] = rank
    return found

"""Moments of a step: an operator's forward or backward, a recomputed block's second forward, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsync.predictor.memory.layout import Layout


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: an operator's forward or backward, without one the loss.

    `again` is the number of the block whose second forward it is.
    """

    op: int | None = None
    is_forward: bool = False
    again: int | None = None


LOSS = Moment()


def moments(at: Layout, block: Sequence[int | None]) -> dict[int, Moment]:
    """Return the moment at each time of a layout; `block` numbers the blocks of operators.

    >>> moments(layout(graph), linear.block)[0]
    Moment(op=0, is_forward=True, again=None)
    """
    num, recomputed = len(at.ops), at.recomputed
    found = {num: LOSS}
    for i in range(num):
        found[i] = Moment(i, True)
        found[recomputed.shifted(2 * num - i) if recomputed else 2 * num - i] = Moment(i)
        if recomputed and recomputed.runs_again(i):
            found[recomputed.second_time(i)] = Moment(i, True, block[i])
    return found

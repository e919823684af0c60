"""Compare ranks' positions in the training loop, and find the rank that others wait for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BEFORE_FORWARD, FORWARD, BACKWARD, AFTER_BACKWARD = range(4)
_WHERE = ("before forward", "in forward", "in backward", "after backward")


class Position(NamedTuple):
    """A position in the training loop; the others wait for the rank with the least.

    `num_gradients` counts this step's watched gradients. `loads` is set while the loop waits for a batch.
    """

    step: int
    phase: int
    num_gradients: int
    loads: bool

    def __str__(self) -> str:
        """Describe the position in words."""
        where = "in data loading" if self.loads else _WHERE[self.phase]
        return f"{where} of step {self.step}"


class Stall:
    """Detect that no rank moves while some wait in a collective. The clock is an argument."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._positions: Mapping[int, Position] = {}
        self._since_s: float | None = None

    def hear(self, now_s: float, positions: Mapping[int, Position]) -> list[int]:
        """Return the ranks that all others wait for, once per stall; all ranks if the network hangs.

        Ranks wait for each other in forward (DDP broadcasts buffers) and in backward. Elsewhere the loop may
        take its time: a long evaluation or compilation on all ranks is not a stall.
        """
        if positions != self._positions:
            self._positions, self._since_s = dict(positions), now_s
        last, first = min(positions.values()), max(positions.values())
        waits = first.phase == BACKWARD or (first.phase == FORWARD and last != first)
        if self._since_s is None or now_s - self._since_s <= self._patience_s or not waits:
            return []
        self._since_s = None  # until some rank moves
        return [rank for rank, position in positions.items() if position == last]


class EarlyEnd:
    """Detect a rank that finished before a backward pass in which this rank now hangs.

    Under gloo that exchange fails. Under NCCL the host continues until it waits for the GPU, anywhere.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._own: Position | None = None
        self._since_s: float | None = None

    def hear(self, now_s: float, own: Position, finished: Mapping[int, int | None]) -> int | None:
        """Return such a rank, once per standstill. `finished` maps ranks to their numbers of steps."""
        if own != self._own:
            self._own, self._since_s = own, now_s
        begun = own.step + (own.phase >= BACKWARD)
        early = [rank for rank, steps in finished.items() if steps is not None and steps < begun]
        if not early or self._since_s is None or now_s - self._since_s <= self._patience_s:
            return None
        self._since_s = None  # until this rank moves
        return early[0]

"""The beats of ranks, by which a rank that falls silent is noticed. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class Pulses:
    """The last beat of each rank, and when it was heard. Pure: the clock is an argument.

    `patience_s` is the longest that a round may take. A longer round shows that this process itself stood
    still.
    """

    def __init__(self, now_s: float, patience_s: float) -> None:
        self.since_s: dict[int, float] = {}
        self._beats: dict[int, str] = {}
        self._heard_s = now_s
        self._patience_s = patience_s

    def hear(self, now_s: float, beats: Mapping[int, str]) -> None:
        """Take in the beats of one round. A rank is alive at `now_s` if its beat is new or has changed."""
        if now_s - self._heard_s > self._patience_s:
            # The machine was suspended or this interpreter was held: that time says nothing of other ranks.
            self.since_s = dict.fromkeys(self.since_s, now_s)
        self._heard_s = now_s
        for rank, beat in beats.items():
            if self._beats.get(rank) != beat:
                self._beats[rank], self.since_s[rank] = beat, now_s

    def forget(self, rank: int) -> None:
        """Expect no more beats of this rank: it has finished."""
        self.since_s.pop(rank, None)

    def silent(self, now_s: float, timeout_s: float) -> list[int]:
        """Return the ranks silent for longer than `timeout_s`, the longest silent first."""
        ranks = [rank for rank, since_s in self.since_s.items() if now_s - since_s > timeout_s]
        return sorted(ranks, key=lambda rank: (self.since_s[rank], rank))

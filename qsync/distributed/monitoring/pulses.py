"""Detect silent ranks by their beats. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class Pulses:
    """The last beat of each rank, and the time of its arrival. Pure: the clock is an argument.

    A round longer than `patience_s` means that this process itself was suspended.
    """

    def __init__(self, now_s: float, patience_s: float) -> None:
        self.since_s: dict[int, float] = {}
        self._beats: dict[int, str] = {}
        self._heard_s = now_s
        self._patience_s = patience_s

    def hear(self, now_s: float, beats: Mapping[int, str]) -> None:
        """Record the beats of one round. A rank is alive at `now_s` if its beat is new or changed."""
        if now_s - self._heard_s > self._patience_s:
            # The machine or interpreter was suspended: this time tells nothing about other ranks.
            self.since_s = dict.fromkeys(self.since_s, now_s)
        self._heard_s = now_s
        for rank, beat in beats.items():
            if self._beats.get(rank) != beat:
                self._beats[rank], self.since_s[rank] = beat, now_s

    def forget(self, rank: int) -> None:
        """Expect no more beats from a finished rank."""
        self.since_s.pop(rank, None)

    def silent(self, now_s: float, timeout_s: float) -> list[int]:
        """Return the ranks silent for more than `timeout_s`, longest first."""
        ranks = [rank for rank, since_s in self.since_s.items() if now_s - since_s > timeout_s]
        return sorted(ranks, key=lambda rank: (self.since_s[rank], rank))

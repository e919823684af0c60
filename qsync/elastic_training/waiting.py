"""Log a card's waiting at once, then every ten seconds, up to a time limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from qsync.errors import QSyncError

logger = logging.getLogger("qsync")

_TOLD_S = 10.0  # seconds between two lines


class Waiting:
    """The current reason of waiting, and its start. The clock is an argument."""

    def __init__(self, card: str, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._card, self._bound_s, self._clock = card, bound_s, clock
        self._what = ""
        self._since_s = self._told_s = 0.0

    def note(self, what: str, is_bounded: bool) -> None:
        """Log the reason of waiting, unless just logged; without a limit only once.

        Raises QSyncError after waiting for one reason longer than the limit.
        """
        now_s = self._clock()
        waited_s = now_s - self._since_s
        if what != self._what:
            self._what, self._since_s, self._told_s = what, now_s, now_s
            logger.warning("qsync: %s waits for %s", self._card, what)
        elif is_bounded and waited_s > self._bound_s:
            raise QSyncError(
                f"{self._card} has waited {waited_s:.0f} s for {what}; look at the output of the missing "
                "cards, or give a larger join_timeout_s"
            )
        elif is_bounded and now_s - self._told_s >= _TOLD_S:
            self._told_s = now_s
            logger.warning("qsync: %s has waited %.0f s for %s", self._card, waited_s, what)

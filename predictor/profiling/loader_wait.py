"""How long a step waits for its next batch: a loader, asked once a step as a training loop asks it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from qsync.errors import CalibrationError
from qsync.predictor.profiling.clocks import Clock


class Loading:
    """Takes batches from `loader` and times how long each takes to come.

    That is what a step pays, whoever prepares batches: all of it without workers, with workers what they are
    late. So `fetch` belongs between real steps, in which workers go on. Waiting for workers takes no CPU
    time: an emulated device (`ShareClock`) sees none of it.

    >>> loading = Loading(loader, clock)
    >>> for _ in range(8): step(loading.fetch())
    >>> loading.wait_s
    """

    def __init__(self, loader: Iterable[Any], clock: Clock) -> None:
        self._batches, self._clock = endless(loader), clock
        self._marks: list[tuple[Any, Any]] = []

    def fetch(self) -> Any:
        """The next batch. Raises what `endless` does."""
        start = self._clock.now()
        batch = next(self._batches)
        self._marks.append((start, self._clock.now()))
        return batch

    @property
    def wait_s(self) -> float:
        """Median seconds of a fetch; the earlier half does not count.

        Workers start with the first fetch, and have batches in store as long as nobody has trained yet.
        """
        self._clock.settle()
        waits = [self._clock.seconds(start, end) for start, end in self._marks]
        return statistics.median(waits[len(waits) // 2 :])


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, pass after pass. Raises CalibrationError for one that cannot be iterated, is
    empty, or ends and cannot be begun again.

    >>> batches = endless(DataLoader(dataset, batch_size=8))
    """
    given = 0
    while True:
        try:
            batches = iter(loader)
        except TypeError as error:
            raise CalibrationError(
                f"the loader is a {type(loader).__name__} that cannot be iterated ({error}); pass what the "
                "training loop takes its batches from"
            ) from error
        before = given
        for batch in batches:
            given += 1
            yield batch
        if given == before:
            raise CalibrationError(
                f"the loader ended after {given} batches and cannot be begun again; pass one that can, as a "
                "DataLoader can"
                if given
                else "the loader gives no batch; pass what the training loop takes its batches from"
            )

"""The wait of a step for its next batch, with one fetch per step as in training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.predictor.profiling.clocks import Clock


class TimedLoader:
    """A loader that times the fetch of every batch.

    Without workers, a step waits for the whole preparation of a batch; with workers, only for the rest of it.
    Call `fetch` between real steps, so that workers prepare batches during the steps. Waiting for workers
    takes no CPU time, so the clock of an emulated device (`ShareClock`) does not count it.

    >>> timed = TimedLoader(loader, clock)
    >>> for _ in range(8): step(timed.fetch())
    >>> timed.wait_s
    """

    def __init__(self, loader: Iterable[Any], clock: Clock) -> None:
        self._batches, self._clock = endless(loader), clock
        self._marks: list[tuple[Any, Any]] = []

    def fetch(self) -> Any:
        """Return the next batch, and time the fetch; pass errors of `endless`."""
        start = self._clock.now()
        batch = next(self._batches)
        self._marks.append((start, self._clock.now()))
        return batch

    @property
    def wait_s(self) -> float:
        """Return the median seconds of a fetch, over the later half of all fetches.

        Workers start with the first fetch and prepare batches ahead until training begins.
        """
        self._clock.settle()
        waits = [self._clock.seconds(start, end) for start, end in self._marks]
        return statistics.median(waits[len(waits) // 2 :])


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches without end, epoch after epoch.

    Raises CalibrationError for a loader that cannot be iterated, is empty, or cannot be iterated twice.

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


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader; within `undrawn`, a later loop still gets this batch.

    Raises CalibrationError for a loader that can be iterated only once (a generator), which would lose the
    batch. Errors of `endless` pass.
    """
    if isinstance(loader, Iterator):
        raise CalibrationError(
            "the loader can be read once, and planning would use up its first batch; give an example_batch, "
            "or a loader that can be begun again, as a DataLoader"
        )
    return next(endless(loader))


@contextmanager
def undrawn(loader: object) -> Iterator[None]:
    """Restore the states of a loader's random generators and samplers after the context."""
    batches = getattr(loader, "batch_sampler", None)
    inside = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    places = (loader, getattr(loader, "sampler", None), batches, *inside)
    found = [getattr(place, "generator", None) for place in places]
    states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    samplers: list[Any] = [one for one in places[1:] if hasattr(one, "load_state_dict")]
    positions = [one.state_dict() for one in samplers]
    try:
        yield
    finally:
        for one, state in states:
            one.set_state(state)
        for sampler, position in zip(samplers, positions, strict=True):
            sampler.load_state_dict(position)

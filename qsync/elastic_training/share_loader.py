"""Load this card's share of samples, ahead of the training loop by worker processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from qsync.distributed.shares import SampleOrder, Share
from qsync.elastic_training.options import ElasticOptions


def _outlive_signal(_: int) -> None:
    """Make a worker process ignore one SIGTERM, which may go to all processes of a card.

    The card finishes its step and leaves, and its workers end with it; stuck workers get a second signal.
    """
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class ShareLoader:
    """Loads this card's micro-batches, also ahead in worker processes; `turn` invalidates those ahead."""

    def __init__(self, dataset: Any, options: ElasticOptions) -> None:
        self._order = SampleOrder(len(dataset), options.seed)
        self._batch_size = options.batch_size
        self._asked: list[int] = []  # generation of every batch requested from workers
        self._generation = 0
        self._place, self._share, self._pass = 0, Share(0, 1, 1), 0  # of the next batch to return
        self._next = (0, 0)  # step and pass of the next batch to request
        self._batches: Iterator[Any] = iter(
            DataLoader(
                dataset, batch_sampler=self, collate_fn=options.collate_fn,
                num_workers=options.num_workers, persistent_workers=options.num_workers > 0,
                worker_init_fn=_outlive_signal if options.num_workers else None,
            )
        )  # fmt: skip

    def turn(self, step: int, share: Share) -> None:
        """Continue with a share of this step, and discard batches loaded ahead for another share."""
        if (step, share, 0) == (self._place, self._share, self._pass):
            return
        self._generation += 1
        self._place, self._share, self._pass = step, share, 0
        self._next = (step, 0)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            step, k = self._next
            size = self._share.samples // self._share.passes
            start = step * self._batch_size + self._share.start + k * size
            self._next = (step, k + 1) if k + 1 < self._share.passes else (step + 1, 0)
            self._asked.append(self._generation)
            yield self._order.indices(start, size)

    def close(self) -> None:
        """Stop loading, and end the worker processes."""
        self._batches = iter(())

    def next_batch(self) -> Any:
        """Return the next micro-batch."""
        while True:
            batch, generation = next(self._batches), self._asked.pop(0)
            if generation == self._generation:
                self._pass += 1
                if self._pass == self._share.passes:
                    self._place, self._pass = self._place + 1, 0
                return batch

"""Share the samples of a global batch out over cards, and say which samples a step takes. Pure.

The batch is the same in every step, whatever the membership. The samples of step s are those at the places
[s B, (s + 1) B) of an endless stream, in which every epoch is one random permutation of the dataset. So no
sample of an epoch is lost or seen twice: the position in the data is the number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a step that one card takes: `samples` from `start` on, in `passes` of equal size."""

    start: int
    samples: int
    passes: int


def share_out(batch_size: int, rates: Sequence[float], limits: Sequence[int | None]) -> list[Share]:
    """Share the samples of a batch out over cards in proportion to their rates.

    Args:
        batch_size: the number of samples of a step.
        rates: of every card, in samples per second; only their ratios count. A rate of 0 is not known, and
            taken for the mean of the others. No more cards than samples.
        limits: of every card, the most samples in one pass; None for no limit.

    Returns:
        The shares, in the order of the cards, each of at least one sample. They add up to the batch.
    """
    known = [rate for rate in rates if rate > 0]
    mean = sum(known) / len(known) if known else 1.0
    rates = [rate or mean for rate in rates]
    spare = batch_size - len(rates)  # every card has one sample
    ideal = [spare * rate / sum(rates) for rate in rates]
    samples = [int(part) for part in ideal]
    by_remainder = sorted(range(len(rates)), key=lambda card: (samples[card] - ideal[card], card))
    for card in by_remainder[: spare - sum(samples)]:
        samples[card] += 1
    samples = _in_equal_passes([number + 1 for number in samples], limits)
    starts = np.cumsum([0, *samples[:-1]]).tolist()
    return [
        Share(start, number, num_passes(number, limit))
        for start, number, limit in zip(starts, samples, limits, strict=True)
    ]


def num_passes(samples: int, limit: int | None) -> int:
    """Return the least number of equal passes that hold at most `limit` samples each.

    >>> num_passes(24, 10)
    3
    """
    least = -(-samples // (limit or samples))
    return next(passes for passes in range(least, samples + 1) if samples % passes == 0)


def _in_equal_passes(samples: list[int], limits: Sequence[int | None]) -> list[int]:
    """Move the samples that would need many small passes to cards that need a single pass."""
    found, rest = list(samples), 0
    for card, (number, limit) in enumerate(zip(samples, limits, strict=True)):
        passes = -(-number // (limit or number))
        if passes > 1:
            found[card] = number - number % passes
            rest += number % passes
    free = [
        card for card, (number, limit) in enumerate(zip(found, limits, strict=True))
        if limit is None or number + rest <= limit
    ]  # fmt: skip
    if not free:
        return samples
    for k in range(rest):
        found[free[k % len(free)]] += 1
    return found


@dataclass(frozen=True)
class SampleOrder:
    """The endless stream of a dataset's indices: one permutation an epoch, from a seed.

    With `drawn` an epoch is what that returns of its number: `num_samples` indices.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True
    drawn: Callable[[int], np.ndarray] | None = None

    def first_step(self, epoch: int, batch_size: int) -> int:
        """Return the first step that begins in an epoch; the one before reaches into it if batches do."""
        return -(-epoch * self.num_samples // batch_size)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the indices of the samples at the places [start, start + count) of the stream."""
        found: list[int] = []
        while count > 0:
            epoch, place = divmod(start, self.num_samples)
            every = None
            if self.drawn is not None:
                every = self.drawn(epoch)
            elif self.shuffle:
                every = _permutation(self.num_samples, self.seed, epoch)
            end = min(place + count, self.num_samples)
            part = list(range(place, end)) if every is None else every[place:end].tolist()
            found += part
            start, count = start + len(part), count - len(part)
        return found


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)

"""Divide a global batch among cards, and find the dataset indices of each step. Pure.

Every step has B samples, whatever the membership: positions [s B, (s + 1) B) of an endless stream of random
permutations of the dataset, one per epoch. So no sample of an epoch is lost or seen twice, and the step
number is the position in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Share:
    """One card's part of a step: `samples` from position `start` on, in `passes` of equal size."""

    start: int
    samples: int
    passes: int


def share_out(batch_size: int, rates: Sequence[float], limits: Sequence[int | None]) -> list[Share]:
    """Divide a batch among cards in proportion to their rates.

    Args:
        batch_size: the number of samples of a step.
        rates: samples per second of every card; only ratios count. 0 means unknown: the mean of the others is
            used. At most as many cards as samples.
        limits: largest number of samples per pass of every card; None for no limit.

    Returns:
        The shares, in the order of the cards, each of at least one sample. They add up to the batch.
    """
    known = [rate for rate in rates if rate > 0]
    mean = sum(known) / len(known) if known else 1.0
    rates = [rate or mean for rate in rates]
    spare = batch_size - len(rates)  # every card has at least one sample
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
    """Return the smallest number of equal passes with at most `limit` samples each.

    >>> num_passes(24, 10)
    3
    """
    least = -(-samples // (limit or samples))
    return next(passes for passes in range(least, samples + 1) if samples % passes == 0)


def _in_equal_passes(samples: list[int], limits: Sequence[int | None]) -> list[int]:
    """Move samples that would need many small passes to cards that need only one pass."""
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
    """The endless stream of a dataset's indices: one permutation per epoch, from a seed.

    `drawn` maps an epoch's number to its `num_samples` indices, instead of the permutation.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True
    drawn: Callable[[int], np.ndarray] | None = None

    def first_step(self, epoch: int, batch_size: int) -> int:
        """Return the first step that starts in an epoch; the step before may reach into it."""
        return -(-epoch * self.num_samples // batch_size)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the indices of stream positions [start, start + count)."""
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

"""Timing that survives a drifting machine: every round runs every variant once, and ratios are of one round.

A virtual machine drifts by 5 to 15 % in minutes and stalls in bursts. Two variants timed in the same second
share both, so their ratio is steadier than either time; the median over rounds drops the bursts.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# A sample is as many calls as take this long. Paired call by call, two copies of one call of 5 ms differed by
# a tenth in every other round (virtual Zen 5): each call found what another variant had left in the caches.
SAMPLE_S, MOST_CALLS = 20e-3, 256
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds per call of one variant, a figure per round: the i-th of every variant is of the same round.

    `calls` were timed together in each.
    """

    seconds: tuple[float, ...]
    calls: int

    @property
    def median_s(self) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.seconds)


def measure(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    ticked: Callable[[], None] = lambda: None,
    sample_s: float = SAMPLE_S,
) -> dict[str, Samples]:
    """Time the variants in turns.

    Everybody finds the caches of the one before, so who goes first rotates, and every other round goes
    backwards.
    Each is called three times beforehand. `ticked` is called after each round. A sample has as many calls as
    take `sample_s`, which differs between processes: variants with collectives need 0, one call a sample.
    """
    names = list(variants)
    calls = {name: _calls(variants[name], device, sample_s) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would fall on whoever happens to run
    try:
        for number in range(rounds):
            start = number % max(len(names), 1)
            order = names[start:] + names[:start]
            for name in order[::-1] if number % 2 else order:
                seconds[name].append(_timed(variants[name], calls[name], device) / calls[name])
            ticked()
    finally:
        gc.enable()
    return {name: Samples(tuple(seconds[name]), calls[name]) for name in names}


def ratios(slower: Samples, faster: Samples) -> list[float]:
    """Return how many times as long `slower` took, round by round."""
    return [a / b for a, b in zip(slower.seconds, faster.seconds, strict=True)]


def quartiles(values: list[float]) -> list[float]:
    """First quartile, median and third quartile; one value is all three."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _calls(run: Callable[[], object], device: torch.device, sample_s: float) -> int:
    for _ in range(WARM_UPS - 1):
        run()
    return min(MOST_CALLS, max(1, math.ceil(sample_s / _timed(run, 1, device))))


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds of so many calls."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Wait for what was started on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

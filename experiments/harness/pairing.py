"""Time variants on a drifting machine: each round runs every variant once, and ratios are per round.

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

# Seconds of a sample, and its largest number of calls. Paired call by call, two copies of one 5 ms call
# differed by a tenth in every other round (virtual Zen 5), because each call found another variant's data in
# the caches.
SAMPLE_S, MOST_CALLS = 20e-3, 256
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds per call of one variant, one value per round. Each value times `calls` calls together."""

    seconds: tuple[float, ...]
    calls: int

    @property
    def median_s(self) -> float:
        """Return the median over rounds."""
        return statistics.median(self.seconds)


def measure(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    ticked: Callable[[], None] = lambda: None,
    sample_s: float = SAMPLE_S,
) -> dict[str, Samples]:
    """Time the variants in turns.

    Caches hold the previous variant's data, so the order rotates, and every other round is reversed. Each
    variant is called three times before. `ticked` is called after each round. A sample has enough calls for
    `sample_s` seconds, a number that differs between processes: variants with collectives need 0 (one call
    per sample).
    """
    names = list(variants)
    calls = {name: _calls(variants[name], device, sample_s) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would hit one variant by chance
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
    """Return how many times as long `slower` takes, per round."""
    return [a / b for a, b in zip(slower.seconds, faster.seconds, strict=True)]


def quartiles(values: list[float]) -> list[float]:
    """Return first quartile, median and third quartile; a single value is all three."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _calls(run: Callable[[], object], device: torch.device, sample_s: float) -> int:
    for _ in range(WARM_UPS - 1):
        run()
    return min(MOST_CALLS, max(1, math.ceil(sample_s / _timed(run, 1, device))))


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds of several calls."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Wait for the GPU's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

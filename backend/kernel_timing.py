"""Time short runs on CPUs and GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch


def synchronize() -> None:
    """Wait for the current GPU's work, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def fastest(
    runs: Sequence[Callable[[], object]], rounds: int = 3, seconds: float = 0.05, tie: float = 0.0
) -> int:
    """Return the number of the run that takes least time: the least of several, taken in turns.

    Rounds end after `seconds`. A run counts as taking least if it takes at most a part of `tie` more; of such
    runs the first is returned. Each run is warmed up. One that takes twice the least is not repeated.

    >>> fastest([lambda: a @ b, lambda: torch.mm(a, b)])
    """
    for run in runs:
        run()
    began, least = time.perf_counter(), [math.inf] * len(runs)
    for _ in range(rounds):
        for k, run in enumerate(runs):
            if least[k] < math.inf and least[k] > 2 * min(least):
                continue
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            least[k] = min(least[k], time.perf_counter() - start)
        if time.perf_counter() - began > seconds:
            break
    return next(k for k, own_s in enumerate(least) if own_s <= (1 + tie) * min(least))


def least_s(run: Callable[[], object], calls: int = 1, wait: Callable[[], None] = lambda: None) -> float:
    """Return the least seconds per call among five timings of `calls` calls between two `wait`s."""
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        times.append((time.perf_counter() - start) / calls)
    return min(times)

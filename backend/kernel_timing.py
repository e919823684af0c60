"""Time short runs on CPUs and GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize() -> None:
    """Wait for the current GPU's work, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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

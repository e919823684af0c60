"""Time short runs on CPUs and GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")
_LEAST_ROUNDS = 5


def apart(run: Callable[[], T]) -> T:
    """Run a trial in a thread of its own, in the middle of a forward pass.

    The caller's hooks on saved tensors do not see it: recomputation (checkpoints) would count what it saves.
    """
    num_threads, trains = torch.get_num_threads(), torch.is_grad_enabled()
    on_gpu = torch.cuda.is_available()
    gpu = torch.cuda.device(torch.cuda.current_device()) if on_gpu else nullcontext()

    def alone() -> T:
        torch.set_num_threads(num_threads)
        with torch.set_grad_enabled(trains), gpu:
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()


def synchronize() -> None:
    """Wait for the current GPU's work, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def fastest(
    runs: Sequence[Callable[[], object]],
    rounds: int = 5,
    seconds: float = 0.05,
    tie: float = 0.0,
    calls: int = 1,
) -> int:
    """Return the number of the run that takes least time: the least of several, taken in turns.

    Rounds end after `seconds`, but not before the fifth: the choice may be kept for good, and one round on a
    busy machine says nothing. A run counts as taking least if it takes at most a part of `tie` more; of such
    runs the first is returned. Each run is warmed up. One that twice took twice the least is not repeated.
    `calls` in a row are timed together: on a GPU, whose queue a step keeps full, the work of one call hides
    the launches of the next.

    >>> fastest([lambda: a @ b, lambda: torch.mm(a, b)])
    """
    for run in runs:
        run()
    began, least = time.perf_counter(), [math.inf] * len(runs)
    for number in range(max(rounds, _LEAST_ROUNDS)):
        left = [k for k in range(len(runs)) if number < 2 or least[k] <= 2 * min(least)]
        for k in left:
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                runs[k]()
            synchronize()
            least[k] = min(least[k], time.perf_counter() - start)
        if number + 1 >= _LEAST_ROUNDS and time.perf_counter() - began > seconds:
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

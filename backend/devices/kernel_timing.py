"""Time short runs on CPUs and GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")
_LEAST_ROUNDS = 5
GPU_ROUNDS, GPU_CALLS = 3, 4  # rounds, and calls in a row per round
_CYCLES = 10_000_000  # GPU clock cycles: a few milliseconds


def apart(run: Callable[[], T]) -> T:
    """Run a timing trial in a separate thread, so that it does not disturb a forward pass.

    The caller's saved-tensor hooks (of activation checkpoints) do not see the trial's tensors.
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
    """Wait for the current GPU's work; do nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def occupy_gpu(seconds: float) -> None:
    """Keep the GPU busy for a few ms, so that the launches that follow run without gaps."""
    cycles = int(seconds * _cycles_per_s(torch.cuda.current_device()))
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@cache
def _cycles_per_s(device: int) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]  # type: ignore[no-untyped-call]
    for mark in marks:
        mark.record()
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    # The first runs load the kernel, and an idle GPU's clock is still rising.
    least_ms = min(float(start.elapsed_time(end)) for start, end in pairwise(marks))
    return 1e3 * _CYCLES / least_ms


def kernel_s(run: Callable[[], object], calls: int = 1) -> tuple[float, float]:
    """Return the seconds of a call on the GPU and of its launches on the host: the least of a few."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    synchronize()
    begun_s = time.perf_counter()
    for _ in range(calls):
        run()
    launched_s = time.perf_counter() - begun_s
    synchronize()
    occupy_gpu(2 * launched_s)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls, launched_s / calls


def fastest_on_gpu(
    runs: Sequence[Callable[[], object]], with_launches: Sequence[bool], tie: float = 0.0
) -> int:
    """Return the index of the run with the fastest GPU kernels; on a tie the first one.

    For a run marked in `with_launches`, host launches count if they take longer than the kernels: it must not
    be slower even in a step that is bound by launches.

    >>> fastest_on_gpu([lambda: quantized(x), lambda: x16 @ w16], [True, False])
    """
    for run in runs:
        run()
    least = [math.inf] * len(runs)
    for _ in range(GPU_ROUNDS):
        for k, run in enumerate(runs):
            of_kernels_s, of_launches_s = kernel_s(run, GPU_CALLS)
            own_s = max(of_kernels_s, of_launches_s) if with_launches[k] else of_kernels_s
            least[k] = min(least[k], own_s)
    return _first_within(least, tie)


def _first_within(seconds: Sequence[float], tie: float) -> int:
    return next(k for k, own_s in enumerate(seconds) if own_s <= (1 + tie) * min(seconds))


def fastest(
    runs: Sequence[Callable[[], object]],
    rounds: int = 5,
    seconds: float = 0.05,
    tie: float = 0.0,
) -> int:
    """Return the index of the fastest run: the least of several timings, taken in turns.

    Rounds end after `seconds`, but not before the fifth, because one round on a busy machine is unreliable.
    Among runs within a fraction `tie` of the fastest the first is returned. Each run is warmed up. A run that
    twice took twice the least time is dropped.

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
            runs[k]()
            synchronize()
            least[k] = min(least[k], time.perf_counter() - start)
        if number + 1 >= _LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
    return _first_within(least, tie)


def least_s(run: Callable[[], object], calls: int = 1) -> float:
    """Return the least seconds per call among five timings of `calls` calls in a row."""

    def several() -> None:
        for _ in range(calls):
            run()

    return min(timings(several, 5)) / calls


def timings(run: Callable[[], object], most: int, enough_s: float = math.inf, least: int = 1) -> list[float]:
    """Return the seconds of each of `least` to `most` runs; stop after `enough_s` seconds.

    >>> min(timings(lambda: a @ b, most=50, enough_s=0.05))
    """
    times: list[float] = []
    while len(times) < most and (len(times) < least or sum(times) < enough_s):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return times

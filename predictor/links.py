"""Measures the link between the real ranks: how long an all-reduce takes, alone and beside compute.

On a CPU the all-reduce runs on the cores that compute, so both slow down while they overlap. Two numbers say by how much:
the rate at which a rank computes while an all-reduce is in flight, and the rate of the all-reduce meanwhile (ours).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from qsync.cluster import Link

_SIZES = (2**18, 2**20, 2**22, 2**23)  # elements: 1 to 32 MiB of FP32
_OVERLAPPED = 2**22


def measure_link(
    device: torch.device, rounds: int = 5, progress: Callable[[str], None] = lambda text: None
) -> Link:
    """The link of the default process group; every rank must call this, and all get the same answer.

    Seconds of an all-reduce are the mean over rounds (a paused rank makes them vary, and the mean is what a step pays),
    fitted as latency + bytes / bandwidth.
    """
    buffers = {size: torch.ones(size, device=device) for size in _SIZES}
    for buffer in buffers.values():
        _timed_all_reduce(buffer, device)
    times: dict[int, list[float]] = {size: [] for size in _SIZES}
    for turn in range(rounds):
        progress(f"link between ranks, round {turn + 1} of {rounds}")
        for size, buffer in buffers.items():
            times[size].append(_timed_all_reduce(buffer, device))
    means = {size: statistics.fmean(values) for size, values in times.items()}
    slope, intercept = statistics.linear_regression([4 * size for size in means], list(means.values()))
    slope = max(slope, 1e-13)
    compute_rate, overlap_rate = _measure_overlap(device, means[_OVERLAPPED], rounds, progress)
    measured = torch.tensor([max(intercept, 1e-6), 1 / slope, compute_rate, overlap_rate], dtype=torch.float64)
    measured = measured.to(device)
    dist.all_reduce(measured)
    latency, bandwidth, compute, overlap = (measured / dist.get_world_size()).tolist()
    return Link(latency, bandwidth, min(compute, 1.0), min(overlap, 1.0))


def _timed_all_reduce(buffer: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(buffer)
    _wait(device)
    return time.perf_counter() - start


def _measure_overlap(
    device: torch.device, alone_s: float, rounds: int, progress: Callable[[str], None]
) -> tuple[float, float]:
    """Rates of compute and of an all-reduce while both run, as shares of their speed alone."""
    operand = torch.ones(256, 256, device=device)
    buffer = torch.ones(_OVERLAPPED, device=device)
    chunk = _repeats_for(operand, device, 0.25 * alone_s)
    compute_rates, overlap_rates = [], []
    for turn in range(rounds):
        progress(f"overlap of compute and communication, round {turn + 1} of {rounds}")
        dist.barrier()
        start = time.perf_counter()
        for _ in range(8):
            _compute(operand, chunk)
        _wait(device)
        per_chunk = (time.perf_counter() - start) / 8
        dist.barrier()
        start = time.perf_counter()
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        done = 0
        while not work.is_completed() and done < 400:
            _compute(operand, chunk)
            done += 1
        work.wait()
        _wait(device)
        elapsed = time.perf_counter() - start
        # All ranks go on computing until their own part is done; the slowest sets the pace of the exchange.
        if done:
            compute_rates.append(min(done * per_chunk / elapsed, 1.0))
            overlap_rates.append(min(alone_s / elapsed, 1.0))
    if not compute_rates:
        return 1.0, 1.0
    return statistics.fmean(compute_rates), statistics.fmean(overlap_rates)


def _repeats_for(operand: torch.Tensor, device: torch.device, seconds: float) -> int:
    start = time.perf_counter()
    _compute(operand, 8)
    _wait(device)
    return max(1, int(seconds / max((time.perf_counter() - start) / 8, 1e-7)))


def _compute(operand: torch.Tensor, repeats: int) -> None:
    for _ in range(repeats):
        operand @ operand


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The link between the real ranks: seconds of an all-reduce, and its toll on overlapping compute.

On a CPU the all-reduce runs on the cores that compute, so both slow down while they overlap. Work is
conserved: compute loses the CPU time of an overlapping all-reduce. On a GPU an all-reduce occupies
multiprocessors, so events time products that fill the GPU, with and without an overlapping all-reduce.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from qsync.predictor.profiling.clocks import CudaClock
from qsync.records.cluster import Link
from qsync.records.compression import CodecCost

_NUM_ELEMENTS = (2**18, 2**20, 2**21, 2**22)  # 1 to 16 MiB of FP32
_OVERLAPPED_ELEMENTS = 2**22
OVERLAPPED_BYTES = 4 * _OVERLAPPED_ELEMENTS
_MAX_CHUNKS = 1000
_GPU_SIDE = 2048  # rows and columns of matrices whose product fills a GPU


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """One rank's measurement: the link (equal on all ranks), and its toll on the rank's compute.

    By kind of compression: `codecs` (equal on all ranks) as `Cluster.codecs`, and `codec_tolls` as
    `Profile.exchange_tolls`.
    """

    link: Link
    toll_s_per_call: float
    toll_s_per_byte: float
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    codec_tolls: Mapping[str, CodecCost] = field(default_factory=dict)


def measure_link(
    device: torch.device,
    emulated_share: float | None = None,
    rounds: int = 6,
    progress: Callable[[str], None] = lambda text: None,
) -> LinkMeasurement:
    """Measure the link of the default process group and its toll on this rank; all ranks must call it.

    The seconds of an all-reduce are fitted as latency + bytes / bandwidth, to means over rounds. Occasional
    pauses of a rank make the seconds vary, and training pays their mean.
    """
    buffers = {size: torch.ones(size, device=device) for size in _NUM_ELEMENTS}
    for buffer in buffers.values():
        _timed_all_reduce(buffer, device)
    walls: dict[int, list[float]] = {size: [] for size in _NUM_ELEMENTS}
    tolls: dict[int, list[float]] = {size: [] for size in _NUM_ELEMENTS}
    for turn in range(rounds):
        progress(f"link between ranks, round {turn + 1} of {rounds}")
        for size, buffer in buffers.items():
            wall, cpu = _timed_all_reduce(buffer, device)
            walls[size].append(wall)
            tolls[size].append(cpu / (emulated_share or 1.0))
    latency, slope = _line({size: statistics.fmean(values) for size, values in walls.items()})
    per_call, per_byte = _line({size: statistics.median(values) for size, values in tolls.items()})
    alone_s = latency + 4 * _OVERLAPPED_ELEMENTS * slope
    if device.type == "cuda":  # the host's CPU time does not measure the GPU's toll
        overlap_rate, lost_s = _measure_overlap_on_gpu(device, alone_s, rounds, progress)
        per_call, per_byte = 0.0, lost_s / (4 * _OVERLAPPED_ELEMENTS)
    else:
        overlap_rate = _measure_overlap(device, alone_s, rounds, progress)
    measured = torch.tensor([latency, slope, overlap_rate], dtype=torch.float64, device=device)
    dist.all_reduce(measured)
    latency, slope, overlap_rate = (measured / dist.get_world_size()).tolist()
    return LinkMeasurement(Link(latency, 1 / slope, overlap_rate, dist.get_world_size()), per_call, per_byte)


def _line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Fit latency and seconds per byte to points of (elements, seconds)."""
    slope, intercept = statistics.linear_regression([4 * size for size in seconds], list(seconds.values()))
    return max(intercept, 1e-7), max(slope, 1e-13)


def median_measurement(found: Sequence[LinkMeasurement]) -> LinkMeasurement:
    """Return the measurement whose numbers are medians over several measurements of a link."""
    links, tolls = [one.link for one in found], [(one.toll_s_per_call, one.toll_s_per_byte) for one in found]
    rates = [(one.latency_s, one.bytes_per_s, one.overlap_rate) for one in links]
    latency_s, bytes_per_s, overlap_rate = map(statistics.median, zip(*rates, strict=True))
    link = Link(latency_s, bytes_per_s, overlap_rate, links[0].num_ranks)
    return LinkMeasurement(link, *map(statistics.median, zip(*tolls, strict=True)))


def _timed_all_reduce(buffer: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Return the wall seconds of one all-reduce, and this process's CPU seconds during it."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    dist.all_reduce(buffer)
    _wait(device)
    return time.perf_counter() - start, time.process_time() - cpu


def _measure_overlap(
    device: torch.device, alone_s: float, rounds: int, progress: Callable[[str], None]
) -> float:
    """Measure the speed of an all-reduce beside compute, relative to its speed alone."""
    operand = torch.ones(256, 256, device=device)
    buffer = torch.ones(_OVERLAPPED_ELEMENTS, device=device)
    chunk = _repeats_for(operand, device, 0.1 * alone_s)
    rates = []
    for turn in range(rounds):
        progress(f"overlap of compute and communication, round {turn + 1} of {rounds}")
        dist.barrier()
        start = time.perf_counter()
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        done = 0
        while not work.is_completed() and done < _MAX_CHUNKS:
            _compute(operand, chunk, device)
            done += 1
        work.wait()
        rates.append(min(alone_s / (time.perf_counter() - start), 1.0))
    return statistics.fmean(rates)


def _measure_overlap_on_gpu(
    device: torch.device, alone_s: float, rounds: int, progress: Callable[[str], None]
) -> tuple[float, float]:
    """Measure the relative speed of an all-reduce beside compute, and the compute seconds lost to it.

    The products last three times as long as the all-reduce, so that they overlap all of it.
    """
    operand = torch.ones(_GPU_SIDE, _GPU_SIDE, device=device)
    buffer = torch.ones(_OVERLAPPED_ELEMENTS, device=device)
    num = _repeats_for(operand, device, 3.0 * alone_s)
    clock, beside = CudaClock(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def products(reduced: bool) -> tuple[float, float]:
        """Return the seconds of the products, and of the all-reduce beside them if `reduced`."""
        dist.barrier()
        _wait(device)
        start = clock.now()
        work = dist.all_reduce(buffer, async_op=True) if reduced else None
        for _ in range(num):
            operand @ operand
        end = clock.now()
        with torch.cuda.stream(beside):  # waits for the all-reduce; the products' stream does not
            if work is not None:
                work.wait()
            done = clock.now()
        clock.settle()
        return clock.seconds(start, end), clock.seconds(start, done)

    rates, losses = [], []
    for turn in range(rounds):
        progress(f"overlap of compute and communication, round {turn + 1} of {rounds}")
        compute_s, _ = products(reduced=False)
        both_s, reduce_s = products(reduced=True)
        rates.append(min(alone_s / reduce_s, 1.0))
        losses.append(max(0.0, both_s - compute_s))
    return statistics.fmean(rates), statistics.median(losses)


def _repeats_for(operand: torch.Tensor, device: torch.device, seconds: float) -> int:
    """Return the number of products that take `seconds` seconds."""
    start = time.perf_counter()
    _compute(operand, 8, device)
    return max(1, int(seconds / max((time.perf_counter() - start) / 8, 1e-7)))


def _compute(operand: torch.Tensor, repeats: int, device: torch.device) -> None:
    for _ in range(repeats):
        operand @ operand
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

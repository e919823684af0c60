"""Prices and errors of compressed exchanges, measured between the ranks of a job."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from qsync.distributed import job
from qsync.distributed.agreement import from_rank_zero
from qsync.distributed.gradient_codecs import CompressedSum, HostGroups, Piece, memory_order, shape_in_memory
from qsync.predictor.profiling.link_benchmark import LinkMeasurement
from qsync.records.cluster import Cluster
from qsync.records.compression import CodecCost, Compression
from qsync.replayer.communication import Bucket, Legs

_SHAPES = ((512, 512), (1024, 1024))  # of probed gradients: 1 and 4 MiB in FP32
_ROUNDS = 3
PROBE_S = 4.0  # seconds after which no further round begins
MOST_LOST = 0.1  # of the squared gradient: `compression="auto"` offers no kind that loses more of it


def measure_codecs(
    kinds: Sequence[str], formed: tuple[Cluster, LinkMeasurement], rank: job.Rank
) -> LinkMeasurement:
    """Return a link's measurement with the seconds of these kinds beyond it; all ranks must call it.

    `formed` is what `job.form_cluster` returned.
    Whole exchanges of two sizes are timed in turns, after which a line through both sizes stands for all.
    On a CPU their processor time is the toll on this rank's compute.
    """
    cluster, link = formed
    if job.world_size() == 1:
        return link
    hosts = HostGroups.make()
    kinds = [*(["fp32"] if hosts is not None else []), *kinds]  # without layers it is DDP's own all-reduce
    sums = {kind: CompressedSum(None, hosts) for kind in kinds}
    walls: dict[tuple[str, int], list[float]] = defaultdict(list)
    tolls: dict[tuple[str, int], list[float]] = defaultdict(list)
    share, began_s = rank.device_class.emulated_share or 1.0, time.perf_counter()
    for turn in range(_ROUNDS + 1):
        for kind in kinds:
            for shape in _SHAPES:
                buffer = torch.randn(shape, device=rank.device)
                wall_s, cpu_s = _timed(sums[kind], buffer, kind)
                if turn:  # the first warms up
                    walls[kind, buffer.nbytes].append(wall_s)
                    tolls[kind, buffer.nbytes].append(cpu_s / share)
        ends = torch.tensor([time.perf_counter() - began_s], device=rank.device)
        dist.broadcast(ends, 0)  # rank 0's clock counts
        if turn and float(ends) > PROBE_S:
            break
    codecs, own = {}, {}
    for kind in kinds:
        sizes = [buffer_bytes for k, buffer_bytes in walls if k == kind]
        means = torch.tensor([statistics.fmean(walls[kind, n]) for n in sizes], dtype=torch.float64)
        means = means.to(rank.device)
        dist.all_reduce(means)
        legs, asked = Legs(replace(cluster, compression={"*": kind})), Compression.parse(kind)
        messages = [legs.messages(asked, [shape], 4 * math.prod(shape)) for shape in _SHAPES]
        beyond = [
            s / job.world_size() - legs.exchange_s(asked, of_shape, 0)[0]
            for s, of_shape in zip(means.tolist(), messages, strict=True)
        ]
        codecs[kind] = _through(sizes, beyond)
        own[kind] = _through(sizes, [statistics.median(tolls[kind, n]) for n in sizes])
    if hosts is not None:
        hosts.destroy()
    return replace(link, codecs=codecs, codec_tolls=own if rank.device.type == "cpu" else {})


def _timed(sums: CompressedSum, buffer: torch.Tensor, kind: str) -> tuple[float, float]:
    """Return the seconds of an exchange, and this process's processor seconds in it."""
    pieces = [Piece(f"probe {len(buffer)}", tuple(buffer.shape))]
    flat = buffer.view(-1)
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about names of collectives
        sums.sum_(flat, pieces, Compression.parse(kind))
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def _through(sizes: Sequence[int], seconds: Sequence[float]) -> CodecCost:
    """Return the line through the seconds of two sizes."""
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return CodecCost(seconds[0] - slope * sizes[0], slope)


def compression_errors(
    gradients: Mapping[str, torch.Tensor], those: Sequence[Bucket], kinds: Sequence[str], rounds: int = 4
) -> dict[str, tuple[float, ...]]:
    """Return by kind the squared error of each bucket's mean gradient, the same on every rank.

    `gradients` are this rank's, by parameter. With error feedback the effective part counts: the squared sum
    of the errors of several exchanges, over their number. Kinds that lose more than `MOST_LOST` of the whole
    gradient's square are left out. All ranks must call it.
    """
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    whole, hosts = 0.0, HostGroups.make()
    for bucket in those:
        parts = [gradients[name] for name in bucket.parameters]
        if any(part.dtype is not torch.float32 or part.is_sparse for part in parts):
            for errors in found.values():
                errors.append(0.0)  # it travels as it is
            continue
        pieces = [Piece(name, shape_in_memory(gradients[name])) for name in bucket.parameters]
        own = torch.cat([part.permute(memory_order(part)).reshape(-1) for part in parts]) / job.world_size()
        exact = own.clone()
        dist.all_reduce(exact)
        whole += float(exact.double().square().sum())
        for kind in kinds:
            asked, sums = Compression.parse(kind), CompressedSum(None, hosts)
            times = rounds if asked.has_feedback else 1
            lost = torch.zeros_like(exact)
            for _ in range(times):
                sent = own.clone()
                sums.sum_(sent, pieces, asked)
                lost += sent - exact
            found[kind].append(float(lost.double().square().sum()) / times)
    if hosts is not None:
        hosts.destroy()
    kept = {kind: errors for kind, errors in found.items() if sum(errors) <= MOST_LOST * whole}
    first = from_rank_zero("errors of compression", lambda: kept)
    return {kind: tuple(errors) for kind, errors in first.items()}

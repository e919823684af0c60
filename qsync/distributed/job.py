"""Join a job: its ranks, their devices, and the cluster that they form.

Every step here is one exchange of `agreement`: an error on one rank is raised on all, and nobody hangs.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import qsync
from qsync import api
from qsync.backend.devices.device_detection import detect_class, device_of
from qsync.backend.devices.emulation import slow_down
from qsync.distributed.agreement import agree, agree_locally, check_same
from qsync.distributed.job_address import JobAddress
from qsync.distributed.monitoring import liveness
from qsync.errors import FormatError, MismatchError, shortened
from qsync.predictor.profiling.leg_benchmark import measure_legs
from qsync.predictor.profiling.link_benchmark import OVERLAPPED_BYTES, LinkMeasurement, measure_link
from qsync.records.cluster import Cluster, DeviceClass, Host, Link
from qsync.records.graph import OpGraph
from qsync.records.record_json import as_json, as_record
from qsync.replayer.communication import cluster_all_reduce_s

Progress = Callable[[str], None]

_num_joins = itertools.count()


def silent(text: str) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a job: its number, its device, and the device's class."""

    device: torch.device
    device_class: DeviceClass


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A rank's training step: a model, one batch, and the loss function.

    Without `loss_fn` the loss is the model output's `.loss`.
    """

    model: torch.nn.Module
    batch: Any
    loss_fn: api.LossFunction | None = None

    def loss(self) -> Callable[[], torch.Tensor]:
        """Return a function that runs the model on the batch and returns the loss."""
        return api.loss_of(self.model, self.batch, self.loss_fn)


def join_job(
    device: torch.device,
    timeout_s: float = 600.0,
    silence_s: float = liveness.DEFAULT_TIMEOUT_S,
    join_timeout_s: float = liveness.JOIN_TIMEOUT_S,
) -> None:
    """Join the job that torchrun's environment variables describe, unless already joined.

    Missing ranks are printed every ten seconds. A rank that does not join within `join_timeout_s`, or is
    silent for `silence_s` meanwhile, ends this process or raises QSyncError. The process leaves the job when
    Python ends without an error. The rank's GPU becomes the current one, because torch exchanges objects over
    NCCL there. Raises QSyncError for a timeout under 1 s.
    """
    liveness.check_timeouts(silence_s, join_timeout_s)
    if device.type == "cuda" and (dist.is_initialized() or "RANK" in os.environ):
        torch.cuda.set_device(device)
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    backend = backend_for(device)
    place = JobAddress.of_environment()
    store = place.connect(join_timeout_s, timedelta(seconds=timeout_s))
    number = next(_num_joins)  # a store may outlive a job, and the process may join another job
    before = PrefixStore(f"qsync/join {number}", store), place.rank, place.world_size
    with liveness.start(silence_s, join_timeout_s, before) as watch:
        watch.wait_for_all()
        dist.init_process_group(
            backend, timeout=timedelta(seconds=timeout_s), store=store, rank=place.rank,
            world_size=place.world_size,
        )  # fmt: skip
    atexit.register(_leave_job)


def _leave_job() -> None:
    """End the process group's threads before the interpreter exits.

    A thread that frees a Python object later aborts the process (SIGABRT, once in some hundred runs on a busy
    machine). After an error the threads are left alone: ending them could wait for a dead peer.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def world_size() -> int:
    """Return the number of ranks; 1 without a job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def check_models(model: torch.nn.Module, extra: Mapping[str, object] | None = None) -> None:
    """Raise MismatchError on every rank unless software versions and parameters are equal on all.

    `extra` holds further facts by name that must be equal.
    """
    layout = [
        f"{name} {tuple(p.shape)} strides {p.stride()} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    ]
    facts: dict[str, object] = {
        "qsync": qsync.__version__,
        "torch": torch.__version__,
        "the model's class": type(model).__name__,
        "the number of parameters": len(layout),
    }
    check_same({**facts, **(extra or {})})
    check_same({f"parameter {i}": text for i, text in enumerate(layout)})


def ranks_on_host() -> int:
    """Return the number of ranks on this host, set by torchrun. Raises FormatError for no number."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not (text.isascii() and text.isdigit() and int(text)):
        raise FormatError(f"LOCAL_WORLD_SIZE must be a number of ranks, found {shortened(text)}; unset it")
    return int(text)


def ranks_by_host(group: dist.ProcessGroup | None = None) -> dict[str, list[int]]:
    """Return the ranks of a group by the name of their host: QSYNC_HOST where it is set."""
    names = agree("finding hosts", lambda: os.environ.get("QSYNC_HOST") or socket.gethostname(), group)
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return found


def backend_for(device: torch.device) -> str:
    """Return the backend of torch.distributed: gloo for CPUs and for mixed jobs, nccl for GPUs.

    Raises FormatError for a QSYNC_BACKEND that this torch lacks.
    """
    asked = os.environ.get("QSYNC_BACKEND")
    for part in asked.split(",") if asked else ():  # single backends, or e.g. "cpu:gloo,cuda:nccl"
        if not dist.is_backend_available(part.rpartition(":")[2]):
            raise FormatError(
                f"QSYNC_BACKEND is {shortened(asked)}, which this torch does not have; correct or unset it"
            )
    return asked or ("nccl" if device.type == "cuda" else "gloo")


def detect_rank(model: torch.nn.Module, emulated_share: float | None = None, name: str | None = None) -> Rank:
    """Detect this rank's device, and name its class (by default automatically).

    `emulated_share` slows the rank to this share of its core. An error on one rank is raised on all.
    """

    def detect() -> Rank:
        device = device_of(model)
        if emulated_share is not None:
            slow_down(device, emulated_share)
        found = detect_class(device, emulated_share, ranks_on_host())
        return Rank(device, replace(found, name=name) if name else found)

    return agree_locally("detecting devices", detect)


def is_first_of(device_class: str) -> bool:
    """Return whether this is the first rank of its device class."""
    first = agree("finding device classes", lambda: device_class).index(device_class)
    return not dist.is_initialized() or dist.get_rank() == first


def form_graph(step: TrainingStep) -> OpGraph:
    """Capture this rank's graph. Raises MismatchError unless it is equal on all ranks."""
    graph = agree_locally("tracing the model", lambda: api.trace_step(step.model, step.batch, step.loss_fn))
    check_same({"the traced graph": graph.hash, "the batch's shapes": graph.shapes_hash})
    return graph


def form_classes(rank: Rank) -> tuple[DeviceClass, ...]:
    """Return the device classes of the job, with their numbers of ranks and least memory."""
    everyone = agree("finding device classes", lambda: as_json(rank.device_class))
    classes: dict[str, DeviceClass] = {}
    for number, entry in enumerate(everyone):
        found = as_record(entry, DeviceClass, f"the device class of rank {number}")
        known = classes.get(found.name)
        if known is not None:
            _check_alike(known, found, number)
        count = known.count + 1 if known else 1
        memory = min(found.memory_bytes, known.memory_bytes) if known else found.memory_bytes
        classes[found.name] = replace(found, count=count, memory_bytes=memory)
    return tuple(classes.values())


def form_cluster(rank: Rank, progress: Progress = silent, rounds: int = 6) -> tuple[Cluster, LinkMeasurement]:
    """Return the cluster of the job, and this rank's measurement of its link."""
    classes = form_classes(rank)
    if world_size() == 1:
        return Cluster(classes, Link(0.0, 1e12)), LinkMeasurement(Link(0.0, 1e12), 0.0, 0.0)
    measured = measure_link(rank.device, rank.device_class.emulated_share, rounds, progress)
    return with_measured_hosts(Cluster(classes, measured.link), rank.device), measured


def with_measured_hosts(cluster: Cluster, device: torch.device) -> Cluster:
    """Return a cluster with the legs of the job's hosts, measured now; of one host as it is.

    An all-reduce over all ranks then takes as long as its link was measured to take: legs are scaled to that.
    """
    by_host = ranks_by_host()
    if len(by_host) == 1:
        return cluster
    names, link = list(by_host), cluster.link
    found = agree("measuring links", lambda: measure_legs(list(by_host.values()), device))
    latency_s, bytes_per_s = ({name: dict[str, float]() for name in names} for _ in range(2))
    for name, ranks in by_host.items():
        for other, seconds, rate in (leg for rank in ranks for leg in found[rank]):
            latency_s[names[other]].setdefault(name, seconds)
            bytes_per_s[names[other]].setdefault(name, rate)
    cluster = replace(cluster, hosts=tuple(
        Host(name, tuple(ranks), latency_s[name], bytes_per_s[name]) for name, ranks in by_host.items()
    ))  # fmt: skip
    factor = (link.latency_s + OVERLAPPED_BYTES / link.bytes_per_s) / cluster_all_reduce_s(
        cluster, OVERLAPPED_BYTES
    )
    return replace(cluster.with_legs(factor, 1.0 / factor), link=link)


def _check_alike(known: DeviceClass, found: DeviceClass, rank: int) -> None:
    """Raise MismatchError unless a rank's device equals those of earlier ranks of its class."""
    for what in ("device", "hardware", "precisions", "emulated_share"):
        own, theirs = (getattr(one, what) for one in (found, known))
        if own != theirs:
            if what == "precisions":
                own, theirs = ", ".join(own), ", ".join(theirs)
            raise MismatchError(
                f"rank {rank} has class {found.name!r}, but its {what} is {own}, while other ranks of that "
                f"class have {theirs}; give it another device_class"
            )

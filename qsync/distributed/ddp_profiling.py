"""A profile in the company that training has: all ranks step together, through DDP, as they will.

Alone a rank finds its caches warm. Beside peers that compute, and all-reduces that run on its cores, the same
operators take a few per cent longer, those that wait for memory up to a quarter (CPU, gloo, two ranks). So
the steps that are timed are whole steps of the job, and what communication adds to them tells how fast the
links are in use. That needs clocks that tell a rank's work from waiting. Where some rank has none (GPUs,
several threads a rank), the ranks step together without DDP, copies to buckets are timed by themselves, and
links stay as they were measured between barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from qsync.distributed.agreement import agree
from qsync.predictor.profiling.clocks import Clock, ShareClock, clock_for
from qsync.predictor.profiling.profiler import MakeOptimizer, Profiler, ProfilerOptions
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.graph import OpGraph
from qsync.records.precision import Precision
from qsync.records.profiles import Profile
from qsync.replayer.link_calibration import in_use
from qsync.runtime import program as runtime

# For how long ranks wait for the gradients of one that failed in the midst of a step: seconds, or steps.
LEAST_PATIENCE_S, PATIENCE = 30.0, 20


class Lockstep:
    """The profiler of one rank of a job (or of a single process), a step at a time with all others.

    `bare` runs the model itself: a rank whose data or kernels are unusable finds out while nobody waits for
    its gradients. `in_ddp` puts it in DDP, on the process group it is given, and returns what runs it there.
    Where classes have different numbers of precisions, those with fewer begin their round again. With
    `save_less` a round has each step a second time, in which operators save less. Raises on every rank what
    any of them raised.

    >>> together = Lockstep(program, bare, in_ddp, parameters, own, device, precisions)
    >>> together.fill(seconds=30.0)
    """

    def __init__(
        self,
        program: runtime.Program,
        bare: Callable[[], torch.Tensor],
        in_ddp: Callable[[dist.ProcessGroup], Callable[[], torch.Tensor]],
        parameters: Sequence[torch.nn.Parameter],
        own: DeviceClass,
        device: torch.device,
        precisions: Sequence[Precision],
        make_optimizer: MakeOptimizer = torch.optim.AdamW,
        progress: Callable[[str], None] = lambda text: None,
        loader: Iterable[Any] | None = None,
        save_less: bool = False,
    ) -> None:
        clock = job_clock(device, own.emulated_share)
        self._own = own
        # Whether steps go through DDP.
        self.in_ddp = all(agree("profiling", lambda: isinstance(clock, ShareClock))) and _has_peers()
        most = max(agree("profiling", lambda: len(precisions)))
        made: list[Profiler] = []
        stepping = bare

        def loss() -> torch.Tensor:
            return stepping()

        options = ProfilerOptions(make_optimizer, progress, save_less, loader, most)
        agree("profiling", lambda: made.append(
            Profiler(program, loss, parameters, precisions, clock, options)
        ))  # fmt: skip
        self.profiler = made[0]
        if _has_peers():
            # Of each step, the rank that takes longest: all time it in the same way, and wait for it.
            everyone = agree("profiling", self.profiler.typical_s)
            typical_s = [max(of_ranks) for of_ranks in zip(*everyone, strict=True)]
            self.profiler.set_typical_s(typical_s)
            patience = timedelta(seconds=max(LEAST_PATIENCE_S, PATIENCE * max(typical_s)))
            if self.in_ddp:
                stepping = in_ddp(dist.new_group(timeout=patience))

    @property
    def num_choices(self) -> int:
        """How many steps a round has, on every rank."""
        return self.profiler.num_choices

    def measure(self, k: int) -> None:
        """The k-th step of a round, on all ranks."""
        agree("profiling", partial(self.profiler.measure, k))

    def fill(self, seconds: float) -> None:
        """As many steps as it takes until every rank knows them to half a per cent, in `seconds`."""
        k = 0
        while any(agree("profiling", lambda: self.profiler.wants_more(seconds))):
            self.measure(k)
            k = (k + 1) % self.num_choices

    def profile(self, machine: Mapping[str, object], slow: Sequence[float] | None = None) -> Profile:
        """This rank's profile. Through DDP, copies to buckets are in the operators' backward times."""
        found = self.profiler.profile(self._own.name, machine, self._own.emulated_share, slow)
        return replace(found, bucket_s_per_byte=0.0) if self.in_ddp else found

    def cluster_in_use(
        self,
        graph: OpGraph,
        profiles: Mapping[str, Profile],
        cluster: Cluster,
        bucket_cap_bytes: int | None,
    ) -> Cluster:
        """The cluster with its link as fast as the steps of the profile say; the same on every rank."""
        if not self.in_ddp:
            return cluster
        samples = zip(self.profiler.waits(), self.profiler.samples(), strict=True)
        own = [[sample[1], wait_s] for (_, wait_s), sample in samples]
        everyone = agree("gathering steps", lambda: own)
        rounds = range(self.num_choices)
        names = agree("gathering steps", lambda: [
            self._own.name,
            [{op: str(p) for op, p in self.profiler.assignment(k).items()} for k in rounds],
            [self.profiler.saves_less(k) for k in rounds],
        ])  # fmt: skip
        plans: list[dict[str, dict[str, Precision]]] = []
        for k in rounds:
            plans.append({})
            for name, chosen, _ in names:
                plans[k].setdefault(name, {op: Precision(p) for op, p in chosen[k].items()})
        runs = []
        for (k, _), ranks in zip(self.profiler.waits(), zip(*everyone, strict=True), strict=True):
            if any(less[k] for _, _, less in names):
                continue  # links are the same there, and what saves less is no part of these plans
            # Of the rank that works longest: the others wait for it.
            rank = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
            runs.append((plans[k], names[rank][0], ranks[rank][1]))
        return in_use(graph, profiles, cluster, runs, bucket_cap_bytes)


def job_clock(device: torch.device, emulated_share: float | None = None) -> Clock:
    """The clock for a rank of a job: on a CPU, with one thread, it leaves out what others do on its core."""
    if not _has_peers() or device.type == "cuda" or torch.get_num_threads() > 1:
        return clock_for(device, emulated_share)
    return ShareClock(emulated_share or 1.0)


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1

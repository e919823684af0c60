"""A rank's runs of several plans in turns, and the profile that is measured between them."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from qsync import api
from qsync.backend.devices.device_detection import machine
from qsync.distributed import job
from qsync.distributed.agreement import agree
from qsync.distributed.data_parallel import in_ddp
from qsync.distributed.ddp_profiling import (
    DdpProfiler,
    ProfileOptions,
    first_of_each_class,
    job_clock,
    with_toll,
)
from qsync.distributed.monitoring.step_phases import CallHook, PhaseTimer
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, median_measurement
from qsync.predictor.profiling.machine_drift import drift_factors
from qsync.predictor.profiling.made_optimizer import made
from qsync.predictor.profiling.node_timer import NodeTimer, timing_hook_s
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plan_folder import Basis
from qsync.records.precision import Precision
from qsync.records.profiles import Sensitivity
from qsync.replayer.explanation import phases
from qsync.replayer.explanation.comparison import kind_of
from qsync.replayer.explanation.phases import Phases
from qsync.runtime import choosers, planned_forward

Assignment = Mapping[str, Precision]
_NUM_WARM_UP_STEPS = 1  # of a plan in one turn: the first step after another assignment does not count


@dataclass(frozen=True, slots=True)
class _Run:
    """One plan in one turn on one rank. `busy_s` is how long a step keeps this rank's device busy."""

    plan: int
    phases: Phases
    busy_s: float
    ended_at_s: float
    by_kind: dict[str, float]  # seconds by kind of node
    outside_s: float  # before and outside of the graph


class PlanRunner:
    """This rank's model, in DDP if there are others, with its profiler. It trains the model."""

    def __init__(self, step: job.TrainingStep, rank: job.Rank, options: ProfileOptions) -> None:
        self._rank, self._progress = rank, options.progress
        self._batches = iter(options.loader) if options.loader is not None else None
        self._program = planned_forward.attach(step.model, lambda graph: {})
        self._profiler = DdpProfiler(self._program, step, rank, options)
        self._model = self._profiler.model
        if job.world_size() > 1 and not self._profiler.in_ddp:
            self._model = in_ddp(step.model, options.bucket_cap_mb)
        self._loss = replace(step, model=self._model).loss()
        trained = api.trained_parameters(step.model)
        self._optimizer = made(options.make_optimizer, trained)
        self._timer = PhaseTimer(self._model, step.model)
        self._clock = job_clock(rank.device, rank.device_class.emulated_share)
        self._node_timer = NodeTimer(self._clock, timing_hook_s(self._clock))
        self._ddp_called: Any = None
        self._model_called: Any = None
        if self._model is not step.model:
            CallHook(self._model, self._on_ddp_call)
            CallHook(step.model, self._on_model_call)
        self._last_gradient: Any = None
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        self._links: list[LinkMeasurement] = []
        self._runs: list[_Run] = []
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            self._step()

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that this rank is profiled in."""
        return self._profiler.precisions

    def take_turn(
        self, assignments: Sequence[Assignment], num_steps: int, title: str, order: random.Random
    ) -> None:
        """Measure the link; then, in random order, take a run of every plan and every step of the profile.

        All ranks begin each run and each step together.
        """
        self._links.append(job.form_cluster(self._rank, self._progress, rounds=2)[1])
        pieces = [(True, k) for k in range(self._profiler.num_choices)]
        pieces += [(False, k) for k in range(len(assignments))]
        order.shuffle(pieces)
        for of_profile, k in pieces:
            if of_profile:
                self._profiler.measure(k)
            else:
                self._progress(f"{title}, plan {k + 1} of {len(assignments)}")
                self._run(k, assignments[k], num_steps)

    def results(self, graph: OpGraph, cluster: Cluster) -> tuple[Basis, list[list[dict[str, Any]]]]:
        """Return the basis from all turns, and of every rank the runs of every plan, as fields of `Measured`.

        All are corrected for the drift of the machine.
        """
        drift = self._drift()
        num_samples = len(drift) - len(self._runs)
        basis = self._basis(graph, cluster, drift[:num_samples])
        own, critical = drift[num_samples:], self._critical(drift[num_samples:])
        return basis, agree("gathering steps", lambda: self._medians(own, critical))

    def _run(self, k: int, assignment: Assignment, num_steps: int) -> None:
        """Take steps of one plan as they are, and then one with timing hooks on its nodes."""
        self._program.choose(choosers.following(assignment))
        if dist.is_initialized():
            dist.barrier()
        self._timer.restart()
        for _ in range(_NUM_WARM_UP_STEPS + 1):  # the first one ends no period
            self._step()
        self._timer.settle()
        self._timer.clear()
        begun_s = time.thread_time()
        for _ in range(num_steps):
            self._step()
        busy_s = (time.thread_time() - begun_s) / num_steps
        self._timer.settle()
        found = phases.mean(self._timer.steps)
        if self._rank.device.type == "cuda":  # the host's CPU time says nothing of the GPU's
            busy_s = found.compute_s
        ended_at_s = time.perf_counter()
        self._program.choose(choosers.following(assignment), self._node_timer)
        self._timed_nodes()  # the first after a change of the graph
        self._runs.append(_Run(k, found, busy_s, ended_at_s, *self._timed_nodes()))

    def _step(self) -> None:
        self._next_batch()
        self._loss().backward()  # type: ignore[no-untyped-call]
        self._update()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _next_batch(self) -> None:
        if self._batches is not None:
            with self._timer.fetching():
                next(self._batches)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = self._clock.now()

    def _on_ddp_call(self) -> None:
        self._ddp_called = self._clock.now()

    def _on_model_call(self) -> None:
        self._model_called = self._clock.now()

    def _timed_nodes(self) -> tuple[dict[str, float], float]:
        """Take a step with timing hooks; return seconds by kind of node, and those outside of the graph."""
        self._next_batch()
        self._node_timer.start()
        loss = self._loss()
        self._node_timer.loss_ready()
        loss.backward()  # type: ignore[no-untyped-call]
        times = self._node_timer.finish(self._last_gradient)
        self._update()
        ops = {op.name: op for op in self._program.graph.ops}
        totals: dict[str, float] = {}
        for node, cost in times.nodes:
            kind = kind_of(node, ops)
            totals[kind] = totals.get(kind, 0.0) + cost.total_s
        # Buffers that DDP hands out before the model runs are communication, not the host's.
        buffers_s = 0.0
        if self._ddp_called is not None:
            buffers_s = self._clock.seconds(self._ddp_called, self._model_called)
        return totals, times.host_s - buffers_s + times.outside.forward_s

    def _drift(self) -> list[float]:
        """Return the drift factor of this rank at each sample of its profile, then at each of its runs."""
        samples = self._profiler.profiler.samples()
        samples += [(f"plan {run.plan}", run.busy_s, run.ended_at_s) for run in self._runs]
        labels, seconds, ended_at_s = zip(*samples, strict=True)
        return drift_factors(labels, seconds, ended_at_s)

    def _basis(self, graph: OpGraph, cluster: Cluster, drift: Sequence[float]) -> Basis:
        """Return profiles and link from the rounds of all turns."""
        link = median_measurement(self._links)
        profile = with_toll(self._profiler.profile(machine(self._rank.device), drift), link)
        profiles = first_of_each_class(agree("gathering profiles", profile.to_json))
        cluster = replace(cluster, link=link.link)
        cluster, profiles = self._profiler.in_use(graph, profiles, cluster)
        return Basis(graph, cluster, profiles, Sensitivity(graph.hash, "none", {}, 1))

    def _critical(self, drift: Sequence[float]) -> list[float]:
        """Return at each run the drift factor of the rank that the others waited for: the least blocked."""
        own = [(run.phases.blocked_s, factor) for run, factor in zip(self._runs, drift, strict=True)]
        return [min(of_ranks)[1] for of_ranks in zip(*agree("gathering paces", lambda: own), strict=True)]

    def _medians(self, drift: Sequence[float], critical: Sequence[float]) -> list[dict[str, Any]]:
        """Return every plan's median run at the machine's usual speed, as fields of `Measured`.

        A rank's own work is divided by its own drift, and waits by that of the rank that all waited for.
        """
        runs: dict[int, list[tuple[_Run, float, float]]] = {}
        for run, own, common in zip(self._runs, drift, critical, strict=True):
            runs.setdefault(run.plan, []).append((run, own, common))
        return [
            {
                "period_s": median(run.phases.period_s / common for run, _, common in of),
                "host_s": median(
                    (run.phases.host_s + run.phases.optimizer_s + run.outside_s) / own for run, own, _ in of
                ),
                "blocked_s": median(run.phases.blocked_s / common for run, _, common in of),
                "loading_s": median(run.phases.loading_s / own for run, own, _ in of),
                "by_kind": {
                    kind: median(run.by_kind.get(kind, 0.0) / own for run, own, _ in of)
                    for kind in dict.fromkeys(kind for run, _, _ in of for kind in run.by_kind)
                },
            }
            for _, of in sorted(runs.items())
        ]

"""Compare predicted and measured steps of random plans on real ranks.

Measurements take turns, so that the machine's drift affects all equally. A turn measures the link and then,
in random order, every step of the profile's round and a few steps of every plan. Each rank's drift is
estimated from all its times (qsync.predictor.profiling.machine_drift) and divided out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from qsync import Cluster, OpGraph, Precision, Profile, api
from qsync.distributed import job
from qsync.distributed.agreement import agree
from qsync.distributed.data_parallel import in_ddp
from qsync.distributed.ddp_profiling import DdpProfiler, ProfileOptions
from qsync.distributed.job_options import HybridOptions
from qsync.distributed.monitoring import liveness
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.experiments.harness.provenance import folder_of
from qsync.experiments.harness.ranks import BUCKET_CAP_MB, FAST, WEAK, Place, run_on_ranks
from qsync.experiments.workloads.families import family_named
from qsync.experiments.workloads.workload import make_optimizer
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, median_measurement
from qsync.predictor.profiling.machine_drift import drift_factors
from qsync.predictor.profiling.made_optimizer import made
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.kernel_support import unsupported_by_shape
from qsync.replayer import replay
from qsync.replayer.chrome_trace import write_trace
from qsync.replayer.exchange_calibration import with_exchange_in_use
from qsync.replayer.explanation import phases
from qsync.replayer.explanation.phases import Phases
from qsync.runtime import choosers, planned_forward

Assignment = Mapping[str, Precision]
_STEPS = 3  # counted steps of a plan per turn
_WARM_UP_STEPS = 2  # uncounted: the first after a switch, and one more, because a period needs a step before


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan (class -> operator -> precision) with its predicted and measured step."""

    assignments: Mapping[str, Mapping[str, str]]
    predicted_s: float
    interval_s: Sequence[float] | None  # nine of ten steps are predicted to lie in it
    measured_s: float

    @property
    def error(self) -> float:
        """Return (predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def is_inside(self) -> bool:
        """Return whether the measured step lies in the predicted interval."""
        return self.interval_s is not None and self.interval_s[0] <= self.measured_s <= self.interval_s[1]


def run_family(
    name: str, num_ranks: int, num_plans: int, seed: int = 0, tiny: bool = False, traces: Path | None = None
) -> list[PlanRun]:
    """Run random plans of a model family on ranks of this machine.

    The folder `traces` gets the first plan's step, predicted and measured, as Chrome traces. Raises
    QSyncError for an unknown family, and if a rank fails.
    """
    family_named(name)
    config = {"family": name, "num_plans": num_plans, "seed": seed, "tiny": tiny, "weak_share": 1.0,
              "traces": str(traces) if traces is not None else None}  # fmt: skip
    runs = run_on_ranks(_run_on_rank, config, command="random_plans", num_ranks=num_ranks)
    return [PlanRun(**run) for run in runs]


def _run_on_rank(config: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """Run a family's plans on one rank, together with the other ranks."""
    model, batches = family_named(config["family"]).make(config["tiny"])
    batch = {
        key: value.to(place.device) if isinstance(value, torch.Tensor) else value
        for key, value in batches[0].items()
    }
    step = job.TrainingStep(model.to(place.device), batch)
    with liveness.start(60.0), shown_on_rank_zero("qsync: running random plans") as progress:
        own = job.detect_rank(step.model, None, FAST if dist.get_rank() == 0 else WEAK)
        asked = HybridOptions(make_optimizer=make_optimizer(1e-4), bucket_cap_mb=BUCKET_CAP_MB)
        options = ProfileOptions(asked, progress=progress)
        traces = Path(config["traces"]) if config["traces"] else None
        runs = run_plans(step, own, options, config["num_plans"], seed=config["seed"], traces=traces)
    return [asdict(run) for run in runs]


def run_plans(
    step: job.TrainingStep,
    rank: job.Rank,
    options: ProfileOptions,
    num_plans: int,
    turns: int = 3,
    seed: int = 0,
    traces: Path | None = None,
) -> list[PlanRun]:
    """Run random plans on all ranks, in turns with profiling; return the same result on every rank.

    It trains the step's model. The folder `traces` gets two Chrome traces of the first plan's step.
    """
    graph = job.form_graph(step)
    runner = _Runner(step, rank, options)
    cluster = job.form_cluster(rank, options.progress, rounds=1)[0]
    own = rank.device_class.name
    everyone: list[Any] = agree("gathering precisions", lambda: [own, [str(p) for p in runner.precisions]])
    usable = {name: [Precision(p) for p in texts] for name, texts in reversed(everyone)}
    plans = random_plans(graph, cluster, usable, num_plans, seed)
    for turn in range(turns):
        runner.take_turn([plan[own] for plan in plans], random.Random(f"{seed} {turn}"))
    cluster, profiles, measured_s = runner.results(graph, cluster)
    runs: list[PlanRun] = []
    for plan, seconds in zip(plans, measured_s, strict=True):
        timeline = replay(graph, plan, profiles, cluster, bucket_cap_bytes=options.asked.bucket_cap_bytes)
        if traces is not None and not runs:
            measured = runner.traced(plan[own])
            if dist.get_rank() == 0:
                write_trace(timeline, folder_of(traces) / "predicted.json")
                measured.export_chrome_trace(str(traces / "measured.json"))
        texts = {name: {op: str(p) for op, p in of.items()} for name, of in plan.items()}
        runs.append(PlanRun(texts, timeline.step_s, timeline.interval_s, seconds))
    return runs


def random_plans(
    graph: OpGraph,
    cluster: Cluster,
    usable: Mapping[str, Sequence[Precision]],
    num_plans: int,
    seed: int = 0,
) -> list[dict[str, Assignment]]:
    """Draw random assignments for every class, equal on every rank. Pure.

    `usable` has each class's precisions. Their weights differ between plans and classes, so that some plans
    lower little and some nearly everything.
    """
    draw = random.Random(seed)
    plans = []
    for _ in range(num_plans):
        plan: dict[str, Assignment] = {}
        for device_class in cluster.classes:
            weights = {p: draw.random() for p in usable[device_class.name]}
            assignment: dict[str, Precision] = {}
            unsupported = unsupported_by_shape(graph, device_class.device)
            for op in graph.adjustable:
                without = unsupported.get(op.name, {})
                able = [p for p in weights if p in PRECISIONS_BY_KIND[op.kind] and p not in without]
                if able:
                    assignment[op.name] = draw.choices(able, [weights[p] for p in able])[0]
            plan[device_class.name] = assignment
        plans.append(plan)
    return plans


@dataclass(frozen=True, slots=True)
class _Turn:
    """One plan's steps in one turn on one rank. `busy_s` is the device's busy time of a step."""

    plan: int
    phases: Phases
    busy_s: float
    ended_at_s: float


class _Runner:
    """Runs this rank's model, in DDP if there are others, with its profiler."""

    def __init__(self, step: job.TrainingStep, rank: job.Rank, options: ProfileOptions) -> None:
        self._rank, self._options = rank, options
        self._program = planned_forward.attach(step.model, lambda graph: {})
        self._profiler = DdpProfiler(self._program, step, rank, options)
        model = self._profiler.model
        if job.world_size() > 1 and not self._profiler.in_ddp:
            model = in_ddp(step.model, options.asked.bucket_cap_mb)
        self._loss = replace(step, model=model).loss()
        self._optimizer = made(options.asked.make_optimizer, api.trained_parameters(step.model))
        self._timer = PhaseTimer(model, step.model)
        self._links: list[LinkMeasurement] = []
        self._turns: list[_Turn] = []
        self._steps(2)  # DDP rebuilds its buckets after the first step

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return this rank's profiled precisions."""
        return self._profiler.precisions

    def take_turn(self, assignments: Sequence[Assignment], order: random.Random) -> None:
        """Measure the link; then run every plan and every profiling step in random order.

        All ranks begin each run and each step together.
        """
        self._links.append(job.form_cluster(self._rank, self._options.progress, rounds=2)[1])
        pieces = [(True, k) for k in range(self._profiler.num_choices)]
        pieces += [(False, k) for k in range(len(assignments))]
        order.shuffle(pieces)
        for of_profile, k in pieces:
            if of_profile:
                self._profiler.measure(k)
            else:
                self._options.progress(f"plan {k + 1} of {len(assignments)}")
                self._run(k, assignments[k])

    def results(self, graph: OpGraph, cluster: Cluster) -> tuple[Cluster, Mapping[str, Profile], list[float]]:
        """Return cluster and profiles from all turns, and every plan's step without drift.

        A period is divided by the drift of the least blocked rank, which the others waited for.
        """
        samples = self._profiler.profiler.samples()
        samples += [(f"plan {turn.plan}", turn.busy_s, turn.ended_at_s) for turn in self._turns]
        labels, seconds, ended_at_s = zip(*samples, strict=True)
        factors = drift_factors(labels, seconds, ended_at_s)
        of_profile, of_turns = factors[: -len(self._turns)], factors[-len(self._turns) :]
        link = median_measurement(self._links)
        cluster, profiles = with_exchange_in_use(
            graph, self._profiler.gathered(link, of_profile), replace(cluster, link=link.link),
            self._profiler.measured_steps(), self._options.asked.bucket_cap_bytes,
        )  # fmt: skip
        own = [
            (turn.plan, turn.phases.period_s, turn.phases.blocked_s, factor)
            for turn, factor in zip(self._turns, of_turns, strict=True)
        ]
        periods_s: dict[int, list[list[float]]] = {}  # by plan, turn and rank
        for ranks in zip(*agree("gathering steps", lambda: own), strict=True):
            *_, factor = min(ranks, key=lambda one: one[2])
            periods_s.setdefault(ranks[0][0], []).append([period_s / factor for _, period_s, _, _ in ranks])
        measured_s = [
            fmean(median(of_rank) for of_rank in zip(*turns, strict=True))
            for _, turns in sorted(periods_s.items())
        ]
        return cluster, profiles, measured_s

    def traced(self, assignment: Assignment) -> torch.profiler.profile:
        """Record one step of an assignment; all ranks call it."""
        self._program.choose(choosers.following(assignment))
        self._steps(_WARM_UP_STEPS)
        found: torch.profiler.profile
        with torch.profiler.profile() as found:
            self._steps(1)
            if self._rank.device.type == "cuda":
                torch.cuda.synchronize(self._rank.device)
        return found

    def _run(self, k: int, assignment: Assignment) -> None:
        self._program.choose(choosers.following(assignment))
        if dist.is_initialized():
            dist.barrier()
        self._timer.restart()
        self._steps(_WARM_UP_STEPS)
        self._timer.settle()
        self._timer.clear()
        begun_s = time.thread_time()
        self._steps(_STEPS)
        busy_s = (time.thread_time() - begun_s) / _STEPS
        self._timer.settle()
        found = phases.mean(self._timer.steps)
        if self._rank.device.type == "cuda":  # the host's CPU time tells nothing about the GPU's
            busy_s = found.compute_s
        self._turns.append(_Turn(k, found, busy_s, time.perf_counter()))

    def _steps(self, num: int) -> None:
        for _ in range(num):
            self._loss().backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()

"""validate: random plans on the real ranks, predicted against measured.

Everything takes turns, so that a drift of the machine falls on all alike: in every turn the link, and then,
in a new order each time, every step of the profile's round and a few steps of every plan. How slow each rank
was at every moment is estimated from all of them together (qsync.predictor.profiling.machine_drift) and taken out of all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from qsync import api
from qsync.backend.device_detection import candidates, device_of, machine
from qsync.distributed import job
from qsync.distributed import step_phases as phases
from qsync.distributed.agreement import agree
from qsync.distributed.ddp_profiling import Lockstep, job_clock
from qsync.errors import CalibrationError
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, median_measurement
from qsync.predictor.profiling.loader_wait import endless
from qsync.predictor.profiling.machine_drift import drift_factors
from qsync.predictor.profiling.node_timer import NodeTimer, timing_hook_s
from qsync.predictor.profiling.profiler import MakeOptimizer
from qsync.records.basis import Basis
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.graph import OpGraph, digest
from qsync.records.kernel_support import unsupported_by_shape
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.records.profiles import Sensitivity
from qsync.replayer import replay
from qsync.replayer.comparison import Measured, Validation, compare, kind_of
from qsync.runtime import program

Assignment = Mapping[str, Precision]
# Steps of a plan in one turn that do not count: the first after another assignment.
WARM_UP = 1


def validate(
    model: torch.nn.Module,
    example_batch: Any,
    loss_fn: api.LossFunction | None = None,
    *,
    num_plans: int = 8,
    turns: int = 3,
    steps: int = 3,
    seed: int = 0,
    device_class: str | None = None,
    emulated_share: float | None = None,
    precisions: Sequence[Precision | str] | None = None,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    bucket_cap_mb: float | None = None,
    folder: str | Path | None = None,
    progress: job.Progress = lambda text: None,
    loader: Iterable[Any] | None = None,
    plans: Mapping[str, Mapping[str, Assignment]] | None = None,
) -> tuple[Validation, Basis]:
    """Run random plans of `model` on every rank of this job and say by how much replay misses each, and why.

    Called on every rank of a torchrun job, or alone. Trains `model` on `example_batch`: pass a copy, or load
    a checkpoint afterwards. `turns` times every plan takes `steps` counted steps; before each a batch is
    taken from `loader`, if given, and only timed. `plans` (name -> class -> assignment), the same on every
    rank, are run in place of random ones. The result is the same on every rank, and rank 0 keeps it
    in `folder`, if given, as validation.json beside the profiles. Raises CalibrationError for numbers that
    cannot be used.

    >>> validation, basis = qsync.validate(model, batch, loss_fn, num_plans=8)
    >>> validation.median_error, validation.comparisons[0].cause
    """
    for name, value, least in (("num_plans", num_plans, 1), ("turns", turns, 1), ("steps", steps, 1)):
        if value < least:
            raise CalibrationError(f"{name} must be at least {least}, found {value}")
    device = device_of(model)
    job.join_job(device)
    given = digest({name: {c: dict(of) for c, of in plan.items()} for name, plan in (plans or {}).items()})
    facts = {"the validation's seed": seed, "its number of plans": num_plans, "its plans": given}
    job.check_models(model, facts)
    own = job.agree_on_class(model, emulated_share, device_class)
    graph = job.form_graph(model, example_batch, loss_fn)
    chosen = [Precision.parse(p) for p in precisions] if precisions else list(candidates(own))
    batches = endless(loader) if loader is not None else None
    ranks = _Ranks(
        model, example_batch, loss_fn, own, chosen, make_optimizer, bucket_cap_mb, progress, batches
    )
    cluster = job.form_cluster(own, device, progress, rounds=1)[0]
    everyone = agree("gathering precisions", lambda: [own.name, [str(p) for p in chosen]])
    usable = {name: [Precision(p) for p in texts] for name, texts in reversed(everyone)}
    if plans is None:
        drawn = random_plans(graph, cluster, usable, num_plans, seed)
        plans = {f"random {k + 1}": plan for k, plan in enumerate(drawn)}
    for turn in range(turns):
        where = f"turn {turn + 1} of {turns}"
        ranks.turn([plan[own.name] for plan in plans.values()], steps, where, random.Random(f"{seed} {turn}"))
    slow = ranks.slow()
    cap = int(bucket_cap_mb * 2**20) if bucket_cap_mb else None
    basis = ranks.basis(graph, cluster, slow, cap)
    critical = ranks.critical(slow)
    found = agree("gathering steps", lambda: ranks.measured(slow, critical))
    by_class: dict[str, list[dict[str, Any]]] = {}
    for (name, _), entries in zip(everyone, found, strict=True):
        by_class.setdefault(name, entries)
    comparisons = tuple(
        compare(
            name, graph, basis.profiles,
            replay(graph, plan, basis.profiles, basis.cluster, bucket_cap_bytes=cap), plan,
            {c: Measured(**entries[k]) for c, entries in by_class.items()},
        )
        for k, (name, plan) in enumerate(plans.items())
    )  # fmt: skip
    validation = Validation(graph.model, machine(), seed, comparisons)
    if folder is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        basis.save(folder)
        validation.save(Path(folder) / "validation.json")
    return validation, basis


def random_plans(
    graph: OpGraph,
    cluster: Cluster,
    usable: Mapping[str, Sequence[Precision]],
    num_plans: int,
    seed: int = 0,
) -> list[dict[str, Assignment]]:
    """Assignments for every class, drawn operator by operator; the same on every rank. Pure.

    Precisions are drawn with weights that differ from plan to plan and class to class, so that some lower
    little and some nearly everything.
    """
    draw = random.Random(seed)
    plans = []
    for _ in range(num_plans):
        plan: dict[str, Assignment] = {}
        for device_class in cluster.classes:
            weights = {p: draw.random() for p in usable[device_class.name]}
            plan[device_class.name] = {}
            without = unsupported_by_shape(graph, device_class.device)
            for op in graph.adjustable:
                refused = without.get(op.name, {})
                able = [p for p in weights if p in PRECISIONS_BY_KIND[op.kind] and p not in refused]
                if able:
                    plan[device_class.name][op.name] = draw.choices(able, [weights[p] for p in able])[0]
        plans.append(plan)
    return plans


@dataclass(slots=True)
class _Seen:
    """What one rank saw of one plan in one turn. `busy_s` is what a step keeps this rank's device busy."""

    plan: int
    phases: phases.Phases
    busy_s: float
    at_s: float
    by_kind: dict[str, float]
    outside_s: float


class _Ranks:
    """This rank's model, in DDP if there are others, with its profiler."""

    def __init__(
        self, model: torch.nn.Module, batch: Any, loss_fn: api.LossFunction | None, own: DeviceClass,
        precisions: Sequence[Precision], make_optimizer: MakeOptimizer, bucket_cap_mb: float | None,
        progress: Callable[[str], None], batches: Iterator[Any] | None,
    ) -> None:  # fmt: skip
        self._own, self._progress, self._batches = own, progress, batches
        self._device = device_of(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._program = program.attach(model, lambda graph: {})
        self._model = model

        def parallel(group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
            self._model = job.in_ddp(model, bucket_cap_mb, group)
            return api.loss_of(self._model, batch, loss_fn)

        self._profile = Lockstep(
            self._program, api.loss_of(model, batch, loss_fn), parallel, trained, own, self._device,
            precisions, make_optimizer, progress, batches,
        )  # fmt: skip
        if job.world_size() > 1 and not self._profile.in_ddp:
            self._model = job.in_ddp(model, bucket_cap_mb)
        self._loss = api.loss_of(self._model, batch, loss_fn)
        self._optimizer = make_optimizer(trained)
        self._timer = phases.PhaseTimer(self._model, model)
        clock = job_clock(self._device, own.emulated_share)
        self._clock, self._recorder = clock, NodeTimer(clock, timing_hook_s(clock))
        self._called: dict[str, Any] = {}  # when DDP was, last (start), and the model in it (end)
        if self._model is not model:
            for name, module in (("start", self._model), ("end", model)):
                phases.before_calls(module, lambda name=name: self._called.update({name: clock.now()}))
        self._last_gradient: Any = None
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda _: self._mark(clock.now()))
        self._links: list[LinkMeasurement] = []
        self._seen: list[_Seen] = []
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            self._step()

    def turn(self, assignments: Sequence[Assignment], steps: int, where: str, order: random.Random) -> None:
        """The link, and in an order of `order`'s every plan and every step of the profile's round.

        All ranks begin each of them together.
        """
        self._links.append(job.form_cluster(self._own, self._device, self._progress, rounds=2)[1])
        pieces = [(True, k) for k in range(self._profile.num_choices)]
        pieces += [(False, k) for k in range(len(assignments))]
        order.shuffle(pieces)
        for of_profile, k in pieces:
            if of_profile:
                self._profile.measure(k)
            else:
                self._progress(f"{where}, plan {k + 1} of {len(assignments)}")
                self._run(k, assignments[k], steps)

    def _run(self, k: int, assignment: Assignment, steps: int) -> None:
        """Steps of one plan: as they are, and then one taken apart."""
        self._program.choose(program.following(assignment))
        self._barrier()
        self._timer.restart()
        for _ in range(WARM_UP + 1):  # the first one ends no period
            self._step()
        self._timer.settle()
        self._timer.steps.clear()
        begun_s = time.thread_time()
        for _ in range(steps):
            self._step()
        busy_s = (time.thread_time() - begun_s) / steps
        self._timer.settle()
        found = phases.mean(self._timer.steps)
        if self._device.type == "cuda":  # the host's CPU time says nothing of the GPU's
            busy_s = found.compute_s
        at_s = time.perf_counter()
        self._program.choose(program.following(assignment), self._recorder)
        self._recorded()  # the first after a change of the graph
        self._seen.append(_Seen(k, found, busy_s, at_s, *self._recorded()))

    def _step(self) -> None:
        self._next_batch()
        self._loss().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _next_batch(self) -> None:
        if self._batches is not None:
            with self._timer.fetching():
                next(self._batches)

    def _mark(self, now: Any) -> None:
        self._last_gradient = now

    def _recorded(self) -> tuple[dict[str, float], float]:
        """One more step, taken apart: seconds by kind of node, and outside of the graph."""
        self._next_batch()
        self._recorder.start()
        loss = self._loss()
        self._recorder.loss_ready()
        loss.backward()  # type: ignore[no-untyped-call]
        times = self._recorder.finish(self._last_gradient)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        ops = {op.name: op for op in self._program.graph.ops}
        totals: dict[str, float] = {}
        for node, cost in times.nodes:
            kind = kind_of(node, ops)
            totals[kind] = totals.get(kind, 0.0) + cost.total_s
        # Buffers that DDP hands out before the model runs are communication, not the host's.
        handing_out_s = self._clock.seconds(**self._called) if self._called else 0.0
        return totals, times.host_s - handing_out_s + times.outside.forward_s

    def slow(self) -> list[float]:
        """How slow this rank was at each sample of its profile, and then at each of its plans' turns."""
        samples = self._profile.profiler.samples()
        samples += [(f"plan {one.plan}", one.busy_s, one.at_s) for one in self._seen]
        labels, seconds, at_s = zip(*samples, strict=True)
        return drift_factors(labels, seconds, at_s)

    def basis(self, graph: OpGraph, cluster: Cluster, slow: Sequence[float], cap: int | None) -> Basis:
        """What the rounds of all turns say, of every class and the link."""
        exchanged = median_measurement(self._links)
        slow = slow[: -len(self._seen)]
        profile = job.with_toll(self._profile.profile(machine(self._device), slow), exchanged)
        profiles = job.first_of_each_class(agree("gathering profiles", profile.to_json))
        cluster = Cluster(cluster.classes, exchanged.link)
        cluster = self._profile.cluster_in_use(graph, profiles, cluster, cap)
        return Basis(graph, cluster, profiles, Sensitivity(graph.hash, "none", {}, 1))

    def critical(self, slow: Sequence[float]) -> list[float]:
        """How slow the rank was that the others waited for, at each of the plans' turns."""
        own = [
            (one.phases.blocked_s, at) for one, at in zip(self._seen, slow[-len(self._seen) :], strict=True)
        ]
        return [min(of_ranks)[1] for of_ranks in zip(*agree("gathering paces", lambda: own), strict=True)]

    def measured(self, slow: Sequence[float], critical: Sequence[float]) -> list[dict[str, Any]]:
        """Every plan's median turn at the machine's usual pace, as `Measured`.

        A rank's own parts are at its own pace; what all wait for, at that of the rank they waited for.
        """
        turns: dict[int, list[tuple[_Seen, float, float]]] = {}
        for one, at, together in zip(self._seen, slow[-len(self._seen) :], critical, strict=True):
            turns.setdefault(one.plan, []).append((one, at, together))
        return [
            {
                "period_s": median(one.phases.period_s / together for one, _, together in of),
                "host_s": median(
                    (one.phases.host_s + one.phases.optimizer_s + one.outside_s) / at for one, at, _ in of
                ),
                "blocked_s": median(one.phases.blocked_s / together for one, _, together in of),
                "loading_s": median(one.phases.loading_s / at for one, at, _ in of),
                "by_kind": {
                    kind: median(one.by_kind.get(kind, 0.0) / at for one, at, _ in of)
                    for kind in dict.fromkeys(kind for one, _, _ in of for kind in one.by_kind)
                },
            }
            for _, of in sorted(turns.items())
        ]

    @staticmethod
    def _barrier() -> None:
        if dist.is_initialized():
            dist.barrier()

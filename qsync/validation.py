"""validate: random plans on the real ranks, predicted against measured.

Everything takes turns, so that a drift of the machine falls on all alike: a round of the profile, one of the
link, a few steps of every plan, and again. What a turn measured is divided by how slow its round of the
profile was.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qsync import api, jobs, phases, runtime
from qsync.cluster import Cluster, DeviceClass
from qsync.contract import agree
from qsync.devices import candidates, device_of, machine
from qsync.errors import CalibrationError
from qsync.folders import Basis
from qsync.graph import OpGraph
from qsync.hybrids import agree_on_class, in_ddp
from qsync.precision import PRECISIONS_BY_KIND, Precision
from qsync.predictor.clocks import clock_for
from qsync.predictor.links import Exchanged, median_exchange
from qsync.predictor.loading import endless
from qsync.predictor.profiler import MakeOptimizer, Profiler
from qsync.predictor.recorder import Recorder, look_s
from qsync.profiles import Sensitivity
from qsync.replayer import replay
from qsync.replayer.comparison import Measured, Validation, compare, kind_of
from qsync.serving import unserved

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
    progress: jobs.Progress = lambda text: None,
    loader: Iterable[Any] | None = None,
) -> tuple[Validation, Basis]:
    """Run random plans of `model` on every rank of this job and say by how much replay misses each, and why.

    Called on every rank of a torchrun job, or alone. Trains `model` on `example_batch`: pass a copy, or load
    a checkpoint afterwards. `turns` times every plan takes `steps` counted steps; before each a batch is
    taken from `loader`, if given, and only timed. The result is the same on every rank, and rank 0 keeps it
    in `folder`, if given, as validation.json beside the profiles. Raises CalibrationError for numbers that
    cannot be used.

    >>> validation, basis = qsync.validate(model, batch, loss_fn, num_plans=8)
    >>> validation.median_error, validation.comparisons[0].cause
    """
    for name, value, least in (("num_plans", num_plans, 1), ("turns", turns, 1), ("steps", steps, 1)):
        if value < least:
            raise CalibrationError(f"{name} must be at least {least}, found {value}")
    device = device_of(model)
    jobs.join_job(device)
    jobs.check_models(model, {"the validation's seed": seed, "its number of plans": num_plans})
    own = agree_on_class(model, emulated_share, device_class)
    graph = jobs.form_graph(model, example_batch, loss_fn)
    chosen = [Precision.parse(p) for p in precisions] if precisions else list(candidates(own))
    batches = endless(loader) if loader is not None else None
    ranks = _Ranks(
        model, example_batch, loss_fn, own, chosen, make_optimizer, bucket_cap_mb, progress, batches
    )
    cluster = jobs.form_cluster(own, device, progress, rounds=1)[0]
    everyone = agree("gathering precisions", lambda: [own.name, [str(p) for p in chosen]])
    usable = {name: [Precision(p) for p in texts] for name, texts in reversed(everyone)}
    plans = random_plans(graph, cluster, usable, num_plans, seed)
    for turn in range(turns):
        ranks.turn([plan[own.name] for plan in plans], steps, f"turn {turn + 1} of {turns}")
    basis = ranks.basis(graph, cluster)
    found = agree("gathering steps", ranks.measured)
    by_class: dict[str, list[dict[str, Any]]] = {}
    for (name, _), entries in zip(everyone, found, strict=True):
        by_class.setdefault(name, entries)
    cap = int(bucket_cap_mb * 2**20) if bucket_cap_mb else None
    comparisons = tuple(
        compare(
            f"random {k + 1}", graph, basis.profiles,
            replay(graph, plan, basis.profiles, basis.cluster, bucket_cap_bytes=cap), plan,
            {name: Measured(**entries[k]) for name, entries in by_class.items()},
        )
        for k, plan in enumerate(plans)
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
            without = unserved(graph, device_class.device)
            for op in graph.adjustable:
                refused = without.get(op.name, {})
                able = [p for p in weights if p in PRECISIONS_BY_KIND[op.kind] and p not in refused]
                if able:
                    plan[device_class.name][op.name] = draw.choices(able, [weights[p] for p in able])[0]
        plans.append(plan)
    return plans


@dataclass(slots=True)
class _Seen:
    """What one rank saw of one plan, a number or a table per turn."""

    phases: list[phases.Phases] = field(default_factory=list)
    by_kind: list[dict[str, float]] = field(default_factory=list)
    outside_s: list[float] = field(default_factory=list)


class _Ranks:
    """This rank's model, in DDP if there are others, with the profiler of a copy of it."""

    def __init__(
        self, model: torch.nn.Module, batch: Any, loss_fn: api.LossFunction | None, own: DeviceClass,
        precisions: Sequence[Precision], make_optimizer: MakeOptimizer, bucket_cap_mb: float | None,
        progress: Callable[[str], None], batches: Iterator[Any] | None,
    ) -> None:  # fmt: skip
        self._own, self._progress, self._batches = own, progress, batches
        self._device = device_of(model)
        twin = copy.deepcopy(model)
        clock = clock_for(self._device, own.emulated_share)
        trained = [p for p in twin.parameters() if p.requires_grad]
        self._profiler = Profiler(
            runtime.attach(twin, lambda graph: {}), api.loss_of(twin, batch, loss_fn), trained, precisions,
            clock, make_optimizer, progress, loader=batches,
        )  # fmt: skip
        self._program = runtime.attach(model, lambda graph: {})
        self._model = in_ddp(model, bucket_cap_mb) if jobs.world_size() > 1 else model
        self._loss = api.loss_of(self._model, batch, loss_fn)
        self._optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        self._timer = phases.PhaseTimer(self._model, model)
        self._clock, self._recorder = clock, Recorder(clock, look_s(clock))
        self._called: dict[str, Any] = {}  # when DDP was, last (start), and the model in it (end)
        if self._model is not model:
            for name, module in (("start", self._model), ("end", model)):
                phases.before_calls(module, lambda name=name: self._called.update({name: clock.now()}))
        self._last_gradient: Any = None
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._mark(clock.now()))
        self._links: list[Exchanged] = []
        self._seen: dict[int, _Seen] = {}
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            self._step()

    def turn(self, assignments: Sequence[Assignment], steps: int, where: str) -> None:
        """A round of the profile and of the link, then every plan."""
        self._barrier()
        agree("profiling", self._profiler.round)
        self._links.append(jobs.form_cluster(self._own, self._device, self._progress, rounds=2)[1])
        for k, assignment in enumerate(assignments):
            self._progress(f"{where}, plan {k + 1} of {len(assignments)}")
            seen = self._seen.setdefault(k, _Seen())
            self._program.choose(runtime.following(assignment))
            self._barrier()
            self._timer.restart()
            for _ in range(WARM_UP + 1):  # the first one ends no period
                self._step()
            self._timer.settle()
            self._timer.steps.clear()
            for _ in range(steps):
                self._step()
            self._timer.settle()
            seen.phases.append(phases.median(self._timer.steps))
            self._program.choose(runtime.following(assignment), self._recorder)
            self._recorded(_Seen())  # the first after a change of the graph
            self._recorded(seen)

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

    def _recorded(self, seen: _Seen) -> None:
        """One more step, taken apart node by node."""
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
        seen.by_kind.append(totals)
        # Buffers that DDP hands out before the model runs are communication, not the host's.
        handing_out_s = self._clock.seconds(**self._called) if self._called else 0.0
        seen.outside_s.append(times.before - handing_out_s + times.outside.forward_s)

    def basis(self, graph: OpGraph, cluster: Cluster) -> Basis:
        """What the rounds of all turns say, of every class."""
        exchanged = median_exchange(self._links)
        profile = self._profiler.profile(self._own.name, machine(), self._own.emulated_share)
        profile = jobs.with_toll(profile, exchanged)
        profiles = jobs.first_of_each_class(agree("gathering profiles", profile.to_json))
        return Basis(
            graph, Cluster(cluster.classes, exchanged.link), profiles, Sensitivity(graph.hash, "none", {}, 1)
        )

    def measured(self) -> list[dict[str, Any]]:
        """Every plan's median turn, each turn at the pace of the profile's median round; as `Measured`."""
        together = agree("gathering drift", self._profiler.drift)
        drift = [statistics.fmean(of_rank) for of_rank in zip(*together, strict=True)]

        def median(values: Sequence[float]) -> float:
            return statistics.median(v / slow for v, slow in zip(values, drift, strict=True))

        return [
            {
                "period_s": median([one.period_s for one in seen.phases]),
                "host_s": median([
                    one.host_s + one.optimizer_s + outside
                    for one, outside in zip(seen.phases, seen.outside_s, strict=True)
                ]),
                "blocked_s": median([one.blocked_s for one in seen.phases]),
                "loading_s": median([one.loading_s for one in seen.phases]),
                "by_kind": {
                    kind: median([totals.get(kind, 0.0) for totals in seen.by_kind])
                    for kind in dict.fromkeys(kind for totals in seen.by_kind for kind in totals)
                },
            }
            for seen in self._seen.values()
        ]  # fmt: skip

    @staticmethod
    def _barrier() -> None:
        if dist.is_initialized():
            dist.barrier()

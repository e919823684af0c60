"""One rank of the comparison: profile, plan, train every way side by side, measure.

All ways live in the same processes and take turns, a few steps each, so that a drift of the machine falls on
all of them alike. Same seeds, same samples, same number of steps. The profile takes turns too: plans are made
from the rounds before training. A step is predicted twice, from these rounds (`planned_step_s`) and from all
rounds (`predicted_step_s`), which separates the error of replay from the drift of the machine. Rank 0 writes
the report.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import qsync
from qsync import Plan, Precision, Profile, QSyncError
from qsync.allocator import uniform
from qsync.allocator.levers.shares import BatchShares
from qsync.allocator.uniform import strongest_of
from qsync.allocator.verdict import find_verdict
from qsync.backend.devices.device_detection import machine
from qsync.backend.precisions_that_pay import emulated_precisions
from qsync.distributed import ddp_profiling, job
from qsync.distributed.agreement import agree, from_rank_zero
from qsync.distributed.ddp_profiling import DdpProfiler
from qsync.distributed.gradient_weighting import batch_norms
from qsync.distributed.job_options import LEAST_WITH_BATCH_NORM, HybridOptions
from qsync.distributed.monitoring import liveness
from qsync.experiments.harness.offered_precisions import offered_precisions
from qsync.experiments.harness.provenance import source
from qsync.experiments.harness.ranks import BUCKET_CAP_BYTES, BUCKET_CAP_MB, Place
from qsync.experiments.mixed import report
from qsync.experiments.mixed.predicted_steps import Predicted, predicted_ways, replayed
from qsync.experiments.mixed.timed_steps import attached_runner, whole_batch
from qsync.experiments.mixed.ways import LEVERS, first_alike
from qsync.experiments.workloads.subjects import demo_workload
from qsync.experiments.workloads.workload import Batch, Workload, evaluate, make_optimizer
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, median_measurement
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import ClassLevers
from qsync.records.plan_folder import Basis, save_plan
from qsync.replayer import Recapture
from qsync.replayer.levers.apply import profile_under
from qsync.runtime import planned_forward
from qsync.runtime.program import Program

STEPS_A_TURN = 4
HELDOUT_BATCHES = 16
PROFILED = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)
PROFILED_BELOW_16BIT = (*PROFILED, Precision.INT8_ALL)
_SEED = 10_000  # of the batches that are profiled; no way trains on it


def run(config: dict[str, Any], place: Place) -> dict[str, Any] | None:
    """Measure, plan, train every way, measure again; rank 0 writes the report and returns it."""
    rank, out, content, tree = dist.get_rank(), Path(config["out"]), None, source()
    workload = demo_workload(config["workload"], config["data"])
    steps = config["steps"] or workload.steps
    with liveness.start(60.0), _progress(rank) as show:
        base = Precision(config["base"])
        measuring = Measuring(workload, place, show, config["rounds"], base, config["turns_a_round"])
        basis = measuring.basis()
        num_steps, predicted = config["seeds"] * steps, dict[str, Predicted]()  # rank 0's alone

        def make_plans() -> dict[str, Any]:
            show("planning every way")
            predicted.update(predicted_ways(
                basis, measuring.other, num_steps=num_steps, alone=measuring.alone, strong=measuring.strong,
                base=base, bucket_cap_bytes=BUCKET_CAP_BYTES, least_samples=measuring.least,
            ))  # fmt: skip
            return {name: entry.plan.to_json() for name, entry in predicted.items()}

        made = from_rank_zero("planning", make_plans)
        plans = {name: Plan.from_json(entry) for name, entry in made.items()}
        verdict = None
        if rank == 0:
            plan = predicted[report.shown(plans)].plan
            options = {"base": base, "least_samples": measuring.least}
            verdict = find_verdict(basis, plan, measuring.other, options)
        seeds = range(config["seed"], config["seed"] + config["seeds"])
        # Between two measurements of one plan there is noise alone.
        trained_as = {name: first_alike(name, plans) for name in plans}
        distinct = {name: plan for name, plan in plans.items() if trained_as[name] == name}
        trained = [_train(workload, distinct, measuring, seed, steps) for seed in seeds]
        results = [{name: one[trained_as[name]] for name in plans} for one in trained]
        after, others = measuring.basis(), (measuring.other, measuring.alone)
    if rank == 0:
        shares = {c.name: c.emulated_share for c in basis.cluster.classes if c.emulated_share}
        again = {name: replayed(entry.plan, after, *others).timeline for name, entry in predicted.items()}
        content = report.assemble(after, predicted, again, results, {
            "workload": workload.name, "base": str(base), "description": workload.description, "steps": steps,
            "seeds": config["seeds"], "seed": config["seed"], "machine": machine(), **tree,
            "qsync": qsync.__version__, "ranks": measuring.classes, "bucket_cap_mb": BUCKET_CAP_MB,
            "emulated": bool(shares), "emulated_share": shares,
            "verdict": verdict.lines() if verdict is not None else [],
            "leave_out": list(verdict.leave_out) if verdict is not None else [],
        })  # fmt: skip
        for name in ("figures.json", "report.html", "trace.json"):  # of another plan
            (out / name).unlink(missing_ok=True)
        save_plan(out, plan, after)
        if others[0] is not None:
            others[0].save(out)
        report.write(out, content, predicted, after, others[0])
    dist.barrier()
    return content


class Measuring:
    """The basis of every plan, measured round by round, on a batch of a seed that no way uses.

    `classes` are those of all ranks. `other` is the model with about as many samples as each class will take,
    as `qsync.hybrid` measures it; `alone` is the strongest class while the others wait, whose ranks are in
    `group`.
    """

    def __init__(
        self,
        workload: Workload,
        place: Place,
        show: Callable[..., None],
        rounds: int,
        base: Precision,
        turns_a_round: int,
    ) -> None:
        self.turns_a_round = turns_a_round  # a round takes about as long as a turn
        self.place, self.show, self._workload = place, show, workload
        self._loss_fn = workload.loss
        model = workload.make_model(0).to(place.device)
        batch = self._on_device(workload.batch(_SEED, 0, dist.get_rank()))
        show("finding out what this machine is")
        job.check_models(model)
        self.rank = job.detect_rank(model, place.measured_share(), place.device_class)
        self.classes: list[str] = agree("finding device classes", lambda: self.rank.device_class.name)
        if len(set(self.classes)) < 2:
            raise QSyncError(
                f"all ranks are of one class, {self.classes[0]}, and equal ranks need no plan; start it on "
                "unequal devices, or emulate a weak rank: qsync demo"
            )
        with place.at_full_speed():
            self._graph = job.form_graph(job.TrainingStep(model, batch, self._loss_fn))
        self.least = LEAST_WITH_BATCH_NORM if batch_norms(model) else 1
        profiled = PROFILED if base is Precision.FP32 else PROFILED_BELOW_16BIT
        if Precision.INT8_ALL in offered_precisions(place.device):
            profiled = tuple(dict.fromkeys((*profiled, Precision.INT8_ALL)))
        able = set(self.rank.device_class.precisions) - emulated_precisions(place.device) | {base}
        self._precisions = [p for p in profiled if p in able]
        with place.at_full_speed():
            found = agree("sensitivity", lambda: qsync.sensitivity(
                model, [batch], self._loss_fn, precisions=profiled).to_json())  # fmt: skip
        self._sensitivity = ddp_profiling.mean_sensitivity(found)
        self._links: list[tuple[Cluster, LinkMeasurement]] = []
        self._profilers = [self._stepping(batch)]
        self._alone: Profiler | None = None
        for _ in range(rounds):
            self.round()
        self.strong = self._strongest(base)
        self.group = dist.new_group([r for r, own in enumerate(self.classes) if own == self.strong])
        # The strongest ranks alone have the machine to themselves: caches, memory and clock rate.
        dist.barrier()
        size, self._alone_levers = self._share_alone(base)
        if self.rank.device_class.name == self.strong:
            self._alone = self._profiler_alone(size, list(dict.fromkeys([Precision.FP32, base])))
        captured = agree("profiling the strongest ranks alone", lambda: (
            self._alone.graph.to_json() if self._alone else None))  # fmt: skip
        self._alone_graph = OpGraph.from_json(next(graph for graph in captured if graph is not None))
        if len(batch[0]) > 1:
            self._measure_other_sizes(base)
        for _ in range(rounds):  # both numbers of samples in turns
            self.round()

    def _measure_other_sizes(self, base: Precision) -> None:
        """Measure the model on as many samples as each class will about take, from now on."""
        basis = self._basis()
        options = {"base": base, "bucket_cap_bytes": BUCKET_CAP_BYTES}
        samples = from_rank_zero(
            "sharing the batch", lambda: BatchShares(basis, None, LEVERS, options, self.least).guess()
        )[self.rank.device_class.name]
        self._profilers.append(self._profilers[0].beside(self._of_samples(samples)))

    def _of_samples(self, samples: int) -> Batch:
        """Return a batch with so many samples, of as many steps as they take."""
        drawn = (whole_batch(self._workload, _SEED, step) for step in itertools.count())
        whole = next(drawn)
        while len(whole[0]) < samples:
            whole = tuple(map(torch.cat, zip(whole, next(drawn), strict=True)))  # type: ignore[assignment]
        return self._on_device((whole[0][:samples], whole[1][:samples]))

    def _share_alone(self, base: Precision) -> tuple[int, ClassLevers]:
        """Return how many samples a strong rank takes in a pass without the others, and its levers.

        It takes its part of the whole batch in as few passes as its memory allows.
        """
        basis, name = self._basis(), self.strong

        def share() -> tuple[int, int]:
            shares = BatchShares(basis, None, LEVERS, {"base": base})
            most = max(1, shares.room()[name])
            whole = basis.cluster.num_ranks * shares.equal // basis.cluster[name].count
            passes = next(k for k in range(1, whole + 1) if whole % k == 0 and whole // k <= most)
            return whole // passes, passes

        size, passes = from_rank_zero("sharing the batch", share)
        return size, ClassLevers(size * passes, passes)

    def _on_device(self, batch: Batch) -> Batch:
        return batch[0].to(self.place.device), batch[1].to(self.place.device)

    def _stepping(self, batch: Batch) -> DdpProfiler:
        """Return the profiler of the job's steps on a batch."""
        model, program = self._attached()
        return DdpProfiler(
            program, job.TrainingStep(model, batch, self._loss_fn), self.rank,
            ddp_profiling.ProfileOptions(HybridOptions(
                precisions=self._precisions, make_optimizer=make_optimizer(self._workload.lr),
                loader=self._loader(), bucket_cap_mb=BUCKET_CAP_MB,
            ), progress=self.show),
        )  # fmt: skip

    def _strongest(self, base: Precision) -> str:
        """Return the class whose step in the base takes least."""
        basis = self._basis()
        found: str = from_rank_zero("finding the strongest class", lambda: strongest_of(
            uniform(basis.graph, basis.profiles, basis.cluster, {}, base=base)))  # fmt: skip
        return found

    def _attached(self) -> tuple[torch.nn.Module, Program]:
        model = self._workload.make_model(0).to(self.place.device)
        return model, planned_forward.attach(model, lambda graph: {}, dynamic=False)

    def _profiler_alone(self, samples: int, precisions: list[Precision]) -> Profiler:
        torch._dynamo.reset()  # otherwise a second shape makes sizes symbols
        model, program = self._attached()
        batch = self._of_samples(samples)
        return Profiler(
            program, lambda: self._loss_fn(model, batch), list(model.parameters()), precisions,
            ddp_profiling.job_clock(self.place.device),
            ProfilerOptions(make_optimizer(self._workload.lr), self.show, loader=self._loader()),
        )  # fmt: skip

    def _loader(self) -> Iterator[Batch]:
        """Batches as `Runner.train` makes them."""
        for step in itertools.count(1):
            yield self._on_device(self._workload.batch(_SEED, step, dist.get_rank()))

    def round(self) -> None:
        """Take one more round of every profile, and of the link."""
        dist.barrier()
        for profiler in self._profilers:
            for k in range(profiler.num_choices):
                profiler.measure(k)
        dist.barrier()
        agree("profiling the strongest ranks alone", lambda: self._alone.round() if self._alone else None)
        self._links.append(job.form_cluster(self.rank, self.show, rounds=2))

    def basis(self) -> Basis:
        """Return the basis from all rounds so far, and note the profiles beside it."""
        here = machine(self.place.device)
        own, share = self.rank.device_class.name, self.rank.device_class.emulated_share
        found = agree("gathering the profile of the strongest ranks alone", lambda: (
            self._alone.profile(own, here, share).to_json() if self._alone else None))  # fmt: skip
        basis, strong = self._basis(), self.strong
        alone = replace(Profile.from_json(next(filter(None, found))), device_class=strong)
        other = Recapture(self._alone_graph, {strong: alone})
        device, levers = basis.cluster[strong].device, self._alone_levers
        is_equal = alone.shapes_hash == self._graph.shapes_hash
        first = alone if is_equal else basis.profiles[strong]
        self.alone = profile_under(basis.graph, first, levers, other, device)
        return basis

    def _basis(self) -> Basis:
        exchanged = self._exchanged()
        profiles, *others = ddp_profiling.gathered_together(self._profilers, exchanged)
        steps = ddp_profiling.measured_together(self._profilers, others)
        self.other = Recapture(self._profilers[1].profiler.graph, others[0]) if others else None
        cluster = replace(self._links[0][0], link=exchanged.link)
        found = Basis(self._graph, cluster, profiles, self._sensitivity)
        return ddp_profiling.calibrated(found, steps, BUCKET_CAP_BYTES)

    def _exchanged(self) -> LinkMeasurement:
        return median_measurement([exchanged for _, exchanged in self._links])


def _train(
    workload: Workload, plans: dict[str, Plan], measuring: Measuring, seed: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Train every way for the same number of steps, in turns; what the ranks measured, by way."""
    device, show = measuring.place.device, measuring.show
    of_rank = (workload, device, seed, measuring.classes, measuring.group)
    runners = {name: attached_runner(name, plan, *of_rank) for name, plan in plans.items()}
    num_turns = -(-steps // STEPS_A_TURN)
    with measuring.place.at_full_speed():
        for runner in runners.values():  # compile, fill caches; not measured, and undone
            dist.barrier()
            if runner is not None:
                runner.warm_up()
    for turn in range(num_turns):
        for number, (name, runner) in enumerate(runners.items()):
            done = f"seed {seed}: {turn * STEPS_A_TURN} of {steps} steps of every way"
            show(f"{done}, {name}", (turn + number / len(runners)) / num_turns)
            dist.barrier()
            if runner is not None:
                runner.train(min(STEPS_A_TURN, steps - turn * STEPS_A_TURN))
        if turn % measuring.turns_a_round == 0:
            measuring.round()
    results = {}
    for name, runner in runners.items():
        show(f"held-out loss and memory of {name}")
        own = runner.outcome() if runner is not None else {}
        results[name] = _together([entry for entry in agree(f"finishing {name}", own.copy) if entry])
        first = min(map(int, results[name]["wait_fraction"]))
        losses = agree(f"the held-out loss of {name}", lambda: (
            _learned(runner.model, workload, device)  # noqa: B023
            if runner is not None and dist.get_rank() == first else None  # noqa: B023
        ))  # fmt: skip
        results[name]["heldout_loss"] = losses[first]
    return results


def _learned(model: torch.nn.Module, workload: Workload, device: torch.device) -> float:
    """Return the held-out loss in FP32, whatever the model trained in: what it learned, not how it runs."""
    planned_forward.detach(model)
    return evaluate(model, workload, device, HELDOUT_BATCHES)


def _together(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine what the ranks know of one way.

    A rank waits for as long as it is blocked beyond the least blocked one.
    """
    periods = entries[0]["periods_s"]
    step_s = statistics.median(periods) if periods else float("nan")
    least = min(entry["blocked_s"] for entry in entries)
    peaks = {str(e["rank"]): e["peak_memory_bytes"] for e in entries}
    return {
        "measured_step_s": step_s, "periods_s": periods, "turns_s": entries[0]["turns_s"],
        "peak_memory_bytes": peaks,
        "wait_fraction": {str(e["rank"]): (e["blocked_s"] - least) / step_s for e in entries},
        "parameters_identical": len({e["parameters"] for e in entries}) == 1,
        "losses": [statistics.fmean(values) for values in zip(*(e["losses"] for e in entries), strict=True)],
    }  # fmt: skip


@contextmanager
def _progress(rank: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar on rank 0; plain lines where there is no terminal."""
    if rank != 0:
        yield lambda text, fraction=None: None
        return
    columns, said = ("{task.description}", BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()), set()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(text: str, fraction: float | None = None) -> None:
            bar.update(task, description=text, completed=fraction)
            stage = text.split(",")[0].split(" of ")[0]
            if not sys.stderr.isatty() and stage not in said:
                print(f"qsync: {text}", file=sys.stderr, flush=True)
                said.add(stage)

        yield show

"""One rank of `qsync demo`: profile, plan, train every run side by side, measure.

All runs live in the same processes and take turns, a few steps each, so that a drift of the machine falls on
all of them alike. Same seeds, same batches, same number of steps. The profile takes turns too: plans are made
from the rounds before training. A step is predicted twice, from these rounds (`planned_step_s`) and from all
rounds (`predicted_step_s`), which separates the error of replay from the drift of the machine. Rank 0 writes
the report.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import qsync
from qsync import Cluster, Plan, Precision, Profile
from qsync.backend.devices.device_detection import machine
from qsync.backend.precisions_that_pay import emulated_precisions
from qsync.distributed import ddp_profiling, job
from qsync.distributed.agreement import agree, from_rank_zero
from qsync.distributed.monitoring import liveness
from qsync.experiments.demo import report
from qsync.experiments.demo.compared_plans import Planned, planned_runs, replayed
from qsync.experiments.demo.timed_steps import attached_runner
from qsync.experiments.harness.offered_precisions import offered_precisions
from qsync.experiments.harness.provenance import source
from qsync.experiments.harness.ranks import ALONE, BUCKET_CAP_BYTES, BUCKET_CAP_MB, FAST, WEAK, Place
from qsync.experiments.workloads.subjects import demo_workload
from qsync.experiments.workloads.workload import Workload, evaluate, make_optimizer
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, median_measurement
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.records.plan_folder import Basis, save_plan
from qsync.replayer import Recapture
from qsync.runtime import planned_forward
from qsync.runtime.program import Program

STEPS_A_TURN = 4
HELDOUT_BATCHES = 16
PROFILED = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)
PROFILED_BELOW_16BIT = (*PROFILED, Precision.INT8_ALL)


def run(config: dict[str, Any], place: Place) -> dict[str, Any] | None:
    """Measure, plan, train every run, measure again; rank 0 writes the report and returns it."""
    rank, out, content, tree = dist.get_rank(), Path(config["out"]), None, source()
    workload = demo_workload(config["workload"], config["data"])
    steps = config["steps"] or workload.steps
    with liveness.start(60.0), _progress(rank) as show:
        base = Precision(config["base"])
        measuring = Measuring(workload, place, show, config["rounds"], base)
        basis = measuring.basis()
        num_steps, planned = config["seeds"] * steps, dict[str, Planned]()  # rank 0's alone

        def make_plans() -> dict[str, Any]:
            show("planning every run")
            planned.update(planned_runs(basis, BUCKET_CAP_BYTES, base, measuring.smaller, num_steps))
            return {name: entry.plan.to_json() for name, entry in planned.items()}

        made = from_rank_zero("planning", make_plans)
        plans = {name: Plan.from_json(entry) for name, entry in made.items()}
        seeds = range(config["seed"], config["seed"] + config["seeds"])
        results = [_train(workload, plans, measuring, seed, steps) for seed in seeds]
        basis = measuring.basis()
    if rank == 0:
        shares = {WEAK: config["weak_share"]} if basis.cluster[WEAK].emulated_share else {}
        again = replayed(planned, basis, BUCKET_CAP_BYTES, measuring.smaller)
        content = report.assemble(basis, planned, again, results, {
            "workload": workload.name, "base": str(base), "description": workload.description, "steps": steps,
            "seeds": config["seeds"], "seed": config["seed"], "machine": machine(), **tree,
            "qsync": qsync.__version__,
            "emulated": bool(shares), "emulated_share": shares, "bucket_cap_mb": BUCKET_CAP_MB,
        })  # fmt: skip
        for name in ("report.json", "report.html", "trace.json"):  # of another plan
            (out / name).unlink(missing_ok=True)
        save_plan(out, planned["qsync"].plan, basis)
        report.write(out, content, planned, basis)
    dist.barrier()
    return content


class Measuring:
    """The basis of every plan, measured round by round, on a batch of a seed that no run uses."""

    def __init__(
        self, workload: Workload, place: Place, show: Callable[..., None], rounds: int, base: Precision
    ) -> None:
        self.place, self.show = place, show
        self._model = workload.make_model(0).to(place.device)
        inputs, targets = workload.batch(10_000, 0, dist.get_rank())
        self._batch = (inputs.to(place.device), targets.to(place.device))
        self._loss_fn = workload.loss
        show("finding out what this machine is")
        job.check_models(self._model)
        name = FAST if dist.get_rank() == 0 else WEAK
        self._rank = job.detect_rank(self._model, place.measured_share(), name)
        self._own = self._rank.device_class
        self._graph = job.form_graph(job.TrainingStep(self._model, self._batch, self._loss_fn))
        self.smaller: Recapture | None = None
        if (half := len(inputs) // 2) > 0:
            torch._dynamo.reset()
            part = tuple(tensor[:half] for tensor in self._batch)
            step = job.TrainingStep(self._model, part, self._loss_fn)
            self.smaller = Recapture(job.form_graph(step), {})
            torch._dynamo.reset()
        profiled = PROFILED if base is Precision.FP32 else PROFILED_BELOW_16BIT
        if Precision.INT8_ALL in offered_precisions(place.device):
            profiled = tuple(dict.fromkeys((*profiled, Precision.INT8_ALL)))
        able = set(self._own.precisions) - emulated_precisions(place.device) | {base}
        precisions = [p for p in profiled if p in able]
        found = agree("sensitivity", lambda: qsync.sensitivity(
            self._model, [self._batch], self._loss_fn, precisions=profiled).to_json())  # fmt: skip
        self._sensitivity = ddp_profiling.mean_sensitivity(found)
        model, program = self._attached(workload)
        step = job.TrainingStep(model, self._batch, self._loss_fn)
        self._profiler = ddp_profiling.DdpProfiler(program, step, self._rank, ddp_profiling.ProfileOptions(
            precisions, make_optimizer(workload.lr), self._loader(workload), BUCKET_CAP_MB, progress=show
        ))  # fmt: skip
        # The fast rank alone has the machine to itself: caches, memory and clock rate that ranks otherwise
        # share.
        dist.barrier()
        alone = list(dict.fromkeys([Precision.FP32, base]))
        self._alone = self._profiler_alone(workload, alone) if dist.get_rank() == 0 else None
        self._links: list[tuple[Cluster, LinkMeasurement]] = []
        for _ in range(rounds):
            self.round()

    def _attached(self, workload: Workload) -> tuple[torch.nn.Module, Program]:
        model = workload.make_model(0).to(self.place.device)
        return model, planned_forward.attach(model, lambda graph: {})

    def _profiler_alone(self, workload: Workload, precisions: list[Precision]) -> Profiler:
        model, program = self._attached(workload)
        return Profiler(
            program, lambda: self._loss_fn(model, self._batch), list(model.parameters()), precisions,
            ddp_profiling.job_clock(self.place.device),
            ProfilerOptions(make_optimizer(workload.lr), self.show, loader=self._loader(workload)),
        )  # fmt: skip

    def _loader(self, workload: Workload) -> Iterator[Any]:
        """Batches as `Runner.train` makes them."""
        for step in itertools.count(1):
            inputs, targets = workload.batch(10_000, step, dist.get_rank())
            yield inputs.to(self.place.device), targets.to(self.place.device)

    def round(self) -> None:
        """One more round of the profile and of the link."""
        dist.barrier()
        for k in range(self._profiler.num_choices):
            self._profiler.measure(k)
        dist.barrier()
        agree("profiling the fast rank alone", lambda: self._alone.round() if self._alone else None)
        self._links.append(job.form_cluster(self._rank, self.show, rounds=2))

    def basis(self) -> Basis:
        """Return the basis from all rounds so far."""
        here = machine(self.place.device)
        exchanged = median_measurement([exchanged for _, exchanged in self._links])
        cluster, profiles = self._profiler.priced(self._graph, self._links[0][0], exchanged)
        alone, *_ = agree("gathering the profile of the fast rank alone", lambda: (
            self._alone.profile(ALONE, here).to_json() if self._alone else {}))  # fmt: skip
        profiles[ALONE] = Profile.from_json(alone)
        return Basis(self._graph, cluster, profiles, self._sensitivity)


def _train(
    workload: Workload, plans: dict[str, Plan], measuring: Measuring, seed: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Train every run for the same number of steps, in turns; what each rank measured, by run."""
    place, show = measuring.place, measuring.show
    runners = {name: attached_runner(name, plan, workload, place, seed) for name, plan in plans.items()}
    num_turns = -(-steps // STEPS_A_TURN)
    for runner in runners.values():  # compile, fill caches; not measured, and undone
        dist.barrier()
        if runner is not None:
            runner.warm_up()
    for turn in range(num_turns):
        for number, (name, runner) in enumerate(runners.items()):
            done = f"seed {seed}: {turn * STEPS_A_TURN} of {steps} steps of every run"
            show(f"{done}, {name}", (turn + number / len(runners)) / num_turns)
            dist.barrier()
            if runner is not None:
                runner.train(min(STEPS_A_TURN, steps - turn * STEPS_A_TURN))
        measuring.round()
    results = {}
    for name, runner in runners.items():
        show(f"held-out loss and memory of {name}")
        own = runner.outcome() if runner is not None else {}
        results[name] = _together([entry for entry in agree(f"finishing {name}", own.copy) if entry])
    dist.barrier()
    if dist.get_rank() == 0:
        for name, runner in runners.items():
            assert runner is not None
            planned_forward.detach(
                runner.model
            )  # in FP32 for every run: what was learned, not how it is served
            loss = evaluate(runner.model, workload, place.device, HELDOUT_BATCHES)
            results[name]["heldout_loss"] = loss
    dist.barrier()
    return results


def _together(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine what the ranks know of one run.

    A rank waits for as long as it is blocked beyond the least blocked one.
    """
    periods = entries[0]["periods_s"]
    step_s = statistics.median(periods) if periods else float("nan")
    least = min(entry["blocked_s"] for entry in entries)
    peaks = {str(e["rank"]): e["peak_memory_bytes"] for e in entries}
    return {
        "measured_step_s": step_s, "periods_s": periods, "peak_memory_bytes": peaks,
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
                print(f"qsync demo: {text}", file=sys.stderr, flush=True)
                said.add(stage)

        yield show

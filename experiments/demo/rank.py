"""One rank of `qsync demo`: profile, plan, train every run side by side, measure. Rank 0 writes what came of
it.

All runs live in the same processes and take turns, a few steps each, so that a drift of the machine falls on
all of them alike. Same seeds, same batches, same number of steps. The profile takes turns too: plans are made
from the rounds before training, and what replay predicts is told twice, from these (`planned_step_s`) and
from all rounds (`predicted_step_s`), so that the replay's own error can be told from the machine's drift.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import qsync
from qsync.backend.device_detection import machine
from qsync.distributed import job, liveness
from qsync.distributed.agreement import agree
from qsync.distributed.ddp_profiling import job_clock
from qsync.distributed.job import in_ddp
from qsync.errors import QSyncError
from qsync.experiments.demo import report
from qsync.experiments.demo.runs import ALONE, FAST, WEAK, Planned, planned_runs, replayed
from qsync.experiments.harness.measured_peak import step_peak_bytes
from qsync.experiments.harness.ranks import Place, backend_of, leave, placed
from qsync.experiments.harness.training import Runner, make_optimizer, persistent_bytes
from qsync.experiments.workloads import demo_workloads
from qsync.experiments.workloads.demo_workloads import Workload
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, median_measurement
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.records.basis import Basis, save_plan
from qsync.records.cluster import Cluster
from qsync.records.precision import Precision
from qsync.records.profiles import Profile
from qsync.runtime import program as runtime

STEPS_A_TURN = 4
HELDOUT_BATCHES = 16
ROUNDS_BEFORE = 3
BUCKET_CAP_MB = 8.0  # smaller than DDP's 25: less is left to reduce when the last gradient is ready
PROFILED = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)


def main() -> None:
    """Entry point of `torchrun -m qsync.experiments.demo.rank CONFIG`, with the configuration as JSON."""
    config = json.loads(sys.argv[1])
    os.environ.setdefault("QSYNC_BACKEND", backend_of())
    try:
        with placed(config["weak_share"]) as place:
            job.join_job(place.device, timeout_s=300.0)
            watch = liveness.start(60.0)
            with watch:
                _run(config, place)
    except QSyncError as error:
        leave("demo", error)


def _run(config: dict[str, Any], place: Place) -> None:
    rank = dist.get_rank()
    out = Path(config["out"])
    workload = demo_workloads.load(config["workload"], config["data"])
    steps = config["steps"] or workload.steps
    cap = int(BUCKET_CAP_MB * 2**20)
    with _progress(rank) as show:
        measuring = Measuring(workload, place, show)
        basis = measuring.basis()
        planned = planned_runs(basis, cap)
        results = []
        for seed in range(config["seed"], config["seed"] + config["seeds"]):
            results.append(_train(workload, planned, measuring, place, seed, steps, show))
        basis = measuring.basis()
    if rank == 0:
        shares = {WEAK: config["weak_share"]} if basis.cluster[WEAK].emulated_share else {}
        content = report.assemble(basis, planned, replayed(planned, basis, cap), results, {
            "workload": workload.name, "description": workload.description, "steps": steps,
            "seeds": config["seeds"], "seed": config["seed"], "machine": machine(), "commit": commit(),
            "qsync": qsync.__version__,
            "emulated": bool(shares), "emulated_share": shares, "bucket_cap_mb": BUCKET_CAP_MB,
        })  # fmt: skip
        save_plan(out, planned["qsync"].plan, basis)
        report.write(out, content, planned, basis)
    dist.barrier()


class Measuring:
    """What every plan is made from, measured round by round. The batch is one of training, of a seed that no
    run uses.
    """

    def __init__(self, workload: Workload, place: Place, show: Callable[[str], None]) -> None:
        self._place, self._show = place, show
        self._model = workload.make_model(0).to(place.device)
        inputs, targets = workload.batch(10_000, 0, dist.get_rank())
        self._batch = (inputs.to(place.device), targets.to(place.device))
        self._loss_fn = lambda model, batch: workload.loss_fn(model(batch[0]), batch[1])
        show("finding out what this machine is")
        job.check_models(self._model)
        share = place.throttle.measured_share(2.0) if place.throttle else None
        self._own = job.own_class(self._model, share, FAST if dist.get_rank() == 0 else WEAK)
        self._graph = job.form_graph(self._model, self._batch, self._loss_fn)
        on_cpu = place.device.type == "cpu"
        precisions = [
            p for p in PROFILED if p in self._own.precisions and not (p is Precision.FP16 and on_cpu)
        ]
        found = agree("sensitivity", lambda: self._sense(PROFILED))
        self._sensitivity = job.mean_sensitivity(found)
        self._profiler = self._make_profiler(workload, precisions)
        # The fast rank alone has the machine to itself: caches, memory and clock rate that ranks otherwise
        # share.
        dist.barrier()
        self._alone = self._make_profiler(workload, [Precision.FP32]) if dist.get_rank() == 0 else None
        self._links: list[tuple[Cluster, LinkMeasurement]] = []
        for _ in range(ROUNDS_BEFORE):
            self.round()

    def _sense(self, precisions: tuple[Precision, ...]) -> dict[str, Any]:
        return qsync.sensitivity(self._model, [self._batch], self._loss_fn, precisions=precisions).to_json()

    def _make_profiler(self, workload: Workload, precisions: list[Precision]) -> Profiler:
        model = workload.make_model(0).to(self._place.device)
        program = runtime.attach(model, lambda graph: {})
        return Profiler(
            program, lambda: self._loss_fn(model, self._batch), list(model.parameters()), precisions,
            job_clock(self._place.device, self._own.emulated_share),
            ProfilerOptions(make_optimizer(workload.lr), self._show, loader=self._loader(workload)),
        )  # fmt: skip

    def _loader(self, workload: Workload) -> Iterator[Any]:
        """Batches as `Runner.train` makes them."""
        for step in itertools.count(1):
            inputs, targets = workload.batch(10_000, step, dist.get_rank())
            yield inputs.to(self._place.device), targets.to(self._place.device)

    def round(self) -> None:
        """One more round of the profile and of the link."""
        dist.barrier()
        agree("profiling", self._profiler.round)
        dist.barrier()
        agree("profiling the fast rank alone", lambda: self._alone.round() if self._alone else None)
        self._links.append(job.form_cluster(self._own, self._place.device, self._show, rounds=2))

    def basis(self) -> Basis:
        """The basis from all rounds so far."""
        here = machine(self._place.device)
        profile = self._profiler.profile(self._own.name, here, self._own.emulated_share)
        profile = job.with_toll(profile, median_measurement([exchanged for _, exchanged in self._links]))
        profiles = job.first_of_each_class(agree("gathering profiles", profile.to_json))
        alone = agree("gathering the profile of the fast rank alone", self._alone_profile)
        profiles[ALONE] = Profile.from_json(alone[0])
        link = median_measurement([exchanged for _, exchanged in self._links]).link
        cluster = replace(self._links[0][0], link=link)
        return Basis(self._graph, cluster, profiles, self._sensitivity)

    def _alone_profile(self) -> dict[str, Any] | None:
        return self._alone.profile(ALONE, machine(self._place.device)).to_json() if self._alone else None


def _train(
    workload: Workload,
    planned: dict[str, Planned],
    measuring: Measuring,
    place: Place,
    seed: int,
    steps: int,
    show: Callable[..., None],
) -> dict[str, dict[str, Any]]:
    """Train every run for the same number of steps, in turns; what each rank measured, by run."""
    rank = dist.get_rank()
    runners = {name: _runner(name, entry, workload, place, seed) for name, entry in planned.items()}
    turns = max(1, -(-steps // STEPS_A_TURN))
    for runner in runners.values():  # compile, fill caches; not measured, and undone
        dist.barrier()
        if runner is not None:
            _warm_up(runner)
    for turn in range(turns):
        for name, runner in runners.items():
            show(
                f"training {name}, seed {seed}",
                (turn * len(runners) + list(runners).index(name)) / (turns * len(runners)),
            )
            dist.barrier()
            if runner is not None:
                runner.train(min(STEPS_A_TURN, steps - turn * STEPS_A_TURN))
        measuring.round()
    results = {}
    for name, runner in runners.items():
        show(f"held-out loss and memory of {name}")
        own = _outcome(runner) if runner is not None else None
        entries = [entry for entry in agree(f"finishing {name}", lambda own=own: own) if entry is not None]
        results[name] = _together(entries)
    dist.barrier()
    if rank == 0:
        for name, runner in runners.items():
            results[name]["heldout_loss"] = _heldout(runner, workload, place) if runner else None
    dist.barrier()
    return results


def _runner(name: str, entry: Planned, workload: Workload, place: Place, seed: int) -> Runner | None:
    """This rank's side of a run; None if it has none."""
    rank = dist.get_rank()
    alone = name == "fast_alone"
    if alone and rank != 0:
        return None
    model = workload.make_model(seed).to(place.device)
    device_class = ALONE if alone else FAST if rank == 0 else WEAK
    runtime.attach(model, runtime.following(entry.plan[device_class].assignment), entry.plan.check_graph)
    trained = model if alone else in_ddp(model, BUCKET_CAP_MB)
    optimizer = make_optimizer(workload.lr)([p for p in model.parameters() if p.requires_grad])
    return Runner(name, model, trained, optimizer, workload, seed, rank, place.device)


def _warm_up(runner: Runner) -> None:
    """Two steps whose effect is undone: weights and buffers are put back, optimizer state is dropped."""
    saved = {name: value.clone() for name, value in runner.model.state_dict().items()}
    runner.train(2)
    runner.model.load_state_dict(saved)
    runner.optimizer = make_optimizer(runner.workload.lr)(
        [p for p in runner.model.parameters() if p.requires_grad]
    )
    runner.step = 0
    for samples in (runner.periods_s, runner.blocked_s, runner.cpu_s, runner.losses):
        samples.clear()


def _outcome(runner: Runner) -> dict[str, Any]:
    """What one rank knows of a run that is over. The step that measures memory changes the weights after
    their digest.
    """
    digest = hashlib.sha256()
    for value in runner.model.parameters():
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    saved = {name: value.clone() for name, value in runner.model.state_dict().items()}
    peak = persistent_bytes(runner) + step_peak_bytes(lambda: runner.train(1), runner.device)
    runner.model.load_state_dict(saved)
    return {
        "rank": runner.rank,
        "parameters": digest.hexdigest(),
        "periods_s": runner.periods_s,
        "blocked_s": statistics.fmean(runner.blocked_s) if runner.blocked_s else 0.0,
        "cpu_s": statistics.median(runner.cpu_s) if runner.cpu_s else 0.0,
        "peak_memory_bytes": peak,
        "losses": runner.losses,
    }


def _together(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """One run from what its ranks know. A rank waits for as long as it is blocked beyond what the least
    blocked one is.
    """
    periods = entries[0]["periods_s"]
    step_s = statistics.median(periods) if periods else float("nan")
    least = min(entry["blocked_s"] for entry in entries)
    return {
        "measured_step_s": step_s,
        "periods_s": periods,
        "wait_fraction": {str(e["rank"]): (e["blocked_s"] - least) / step_s for e in entries},
        "cpu_s": {str(e["rank"]): e["cpu_s"] for e in entries},
        "peak_memory_bytes": {str(e["rank"]): e["peak_memory_bytes"] for e in entries},
        "parameters_identical": len({e["parameters"] for e in entries}) == 1,
        "losses": [statistics.fmean(values) for values in zip(*(e["losses"] for e in entries), strict=True)],
    }


def _heldout(runner: Runner, workload: Workload, place: Place) -> float:
    """Held-out loss of the trained weights, in FP32 for every run: what was learned, not how it is served."""
    runtime.detach(runner.model)
    return demo_workloads.evaluate(runner.model, workload, place.device, HELDOUT_BATCHES)


def commit() -> str:
    """The commit of this source tree, `unknown` outside of one."""
    where = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


class _progress:
    """A progress bar on rank 0; plain lines where there is no terminal."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._bar: Progress | None = None
        self._said: set[str] = set()

    def __enter__(self) -> Callable[..., None]:
        if self._rank == 0:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self.show

    def show(self, text: str, fraction: float | None = None) -> None:
        if self._bar is None:
            return
        self._bar.update(self._task, description=text, completed=fraction)
        stage = text.split(",")[0].split(" of ")[0]
        if not sys.stderr.isatty() and stage not in self._said:
            print(f"qsync demo: {text}", file=sys.stderr, flush=True)
            self._said.add(stage)

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    main()

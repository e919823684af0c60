"""One rank of `qsync demo`: profile, plan, train every run side by side, measure. Rank 0 writes what came of it.

All runs live in the same processes and take turns, a few steps each, so that a drift of the machine falls on all of them
alike. Same seeds, same batches, same number of steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import qsync
from qsync import jobs, liveness, runtime
from qsync.contract import agree
from qsync.devices import machine
from qsync.errors import QSyncError
from qsync.experiments import report, workloads
from qsync.experiments.demo_runs import FAST, WEAK, Planned, planned_runs
from qsync.experiments.memory import step_peak_bytes
from qsync.experiments.ranks import Place, backend_of, placed
from qsync.experiments.training import Runner, make_optimizer, persistent_bytes
from qsync.experiments.workloads import Workload
from qsync.folders import Basis, save_plan
from qsync.hybrids import in_ddp
from qsync.precision import Precision

STEPS_A_TURN = 5
HELDOUT_BATCHES = 16
BUCKET_CAP_MB = 4.0  # small buckets: little is left to reduce when the last gradient is ready
PROFILED = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)


def main() -> None:
    """Entry point of `torchrun -m qsync.experiments.demo_rank CONFIG`, with the configuration as JSON."""
    config = json.loads(sys.argv[1])
    os.environ.setdefault("QSYNC_BACKEND", backend_of())
    try:
        with placed(config["weak_share"]) as place:
            jobs.join_job(place.device, timeout_s=300.0)
            watch = liveness.start(60.0)
            with watch:
                _run(config, place)
    except QSyncError as error:
        if int(os.environ["RANK"]) == 0:
            print(f"qsync demo: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _run(config: dict[str, Any], place: Place) -> None:
    rank = dist.get_rank()
    out = Path(config["out"])
    steps = config["steps"]
    # Read on rank 0 first, so that bad data is one sentence and not two.
    workload = workloads.load(config["workload"], config["data"])
    steps = steps or workload.steps
    with _progress(rank) as show:
        basis = _measure(workload, place, show)
        planned = planned_runs(basis, int(BUCKET_CAP_MB * 2**20))
        results = []
        for seed in range(config["seed"], config["seed"] + config["seeds"]):
            results.append(_train(workload, planned, place, seed, steps, show))
    if rank == 0:
        shares = {WEAK: config["weak_share"]} if basis.cluster[WEAK].emulated_share else {}
        content = report.assemble(basis, planned, results, {
            "workload": workload.name, "description": workload.description, "steps": steps, "seeds": config["seeds"],
            "seed": config["seed"], "machine": machine(), "commit": commit(), "qsync": qsync.__version__,
            "emulated": bool(shares), "emulated_share": shares, "bucket_cap_mb": BUCKET_CAP_MB,
        })  # fmt: skip
        save_plan(out, planned["qsync"].plan, basis)
        report.write(out, content, planned, basis)
    dist.barrier()


def _measure(workload: Workload, place: Place, show: Callable[[str], None]) -> Basis:
    """What every plan is made from. The batch is one of training, of a seed that no run uses."""
    model = workload.make_model(0).to(place.device)
    inputs, targets = workload.batch(10_000, 0, dist.get_rank())
    batch = (inputs.to(place.device), targets.to(place.device))

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return workload.loss_fn(model(batch[0]), batch[1])

    show("finding out what this machine is")
    jobs.check_models(model)
    share = place.throttle.measured_share(2.0) if place.throttle else None
    own = jobs.own_class(model, share, FAST if dist.get_rank() == 0 else WEAK)
    graph = jobs.form_graph(model, batch, loss_fn)
    cluster = jobs.form_cluster(own, place.device, show)
    precisions = [p for p in PROFILED if p in own.precisions and not (p is Precision.FP16 and place.device.type == "cpu")]
    return jobs.form_basis(
        model, batch, loss_fn, own, cluster, graph=graph, precisions=precisions,
        make_optimizer=make_optimizer(workload.lr), progress=show,
    )  # fmt: skip


def _train(
    workload: Workload, planned: dict[str, Planned], place: Place, seed: int, steps: int, show: Callable[..., None]
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
            show(f"training {name}, seed {seed}", (turn * len(runners) + list(runners).index(name)) / (turns * len(runners)))
            dist.barrier()
            if runner is not None:
                runner.train(min(STEPS_A_TURN, steps - turn * STEPS_A_TURN))
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
    runtime.attach(model, runtime.following(entry.plan[FAST if rank == 0 else WEAK].assignment), entry.plan.check_graph)
    trained = model if alone else in_ddp(model, BUCKET_CAP_MB)
    optimizer = make_optimizer(workload.lr)([p for p in model.parameters() if p.requires_grad])
    return Runner(name, model, trained, optimizer, workload, seed, rank, place.device)


def _warm_up(runner: Runner) -> None:
    """Two steps whose effect is undone: weights and buffers are put back, optimizer state is dropped."""
    saved = {name: value.clone() for name, value in runner.model.state_dict().items()}
    runner.train(2)
    runner.model.load_state_dict(saved)
    runner.optimizer = make_optimizer(runner.workload.lr)([p for p in runner.model.parameters() if p.requires_grad])
    runner.step = 0
    for samples in (runner.periods_s, runner.blocked_s, runner.losses):
        samples.clear()


def _outcome(runner: Runner) -> dict[str, Any]:
    """What one rank knows of a run that is over. The step that measures memory changes the weights after their digest."""
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
        "peak_memory_bytes": peak,
        "losses": runner.losses,
    }


def _together(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """One run from what its ranks know. A rank waits for as long as it is blocked beyond what the least blocked one is."""
    periods = entries[0]["periods_s"]
    step_s = statistics.median(periods) if periods else float("nan")
    least = min(entry["blocked_s"] for entry in entries)
    return {
        "measured_step_s": step_s,
        "periods_s": periods,
        "wait_fraction": {str(e["rank"]): (e["blocked_s"] - least) / step_s for e in entries},
        "peak_memory_bytes": {str(e["rank"]): e["peak_memory_bytes"] for e in entries},
        "parameters_identical": len({e["parameters"] for e in entries}) == 1,
        "losses": [statistics.fmean(values) for values in zip(*(e["losses"] for e in entries), strict=True)],
    }


def _heldout(runner: Runner, workload: Workload, place: Place) -> float:
    """Held-out loss of the trained weights, in FP32 for every run: what was learned, not how it is served."""
    runtime.detach(runner.model)
    return workloads.evaluate(runner.model, workload, place.device, HELDOUT_BATCHES)


def commit() -> str:
    """The commit of this source tree, `unknown` outside of one."""
    where = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class _progress:
    """A progress bar on rank 0; plain lines where there is no terminal."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._bar: Progress | None = None
        self._said = ""

    def __enter__(self) -> Callable[..., None]:
        if self._rank == 0:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self.show

    def show(self, text: str, fraction: float | None = None) -> None:
        if self._bar is None:
            return
        self._bar.update(self._task, description=text, completed=fraction)
        stage = text.split(",")[0].split(" of ")[0]
        if not sys.stderr.isatty() and stage != self._said:
            print(f"qsync demo: {text}", file=sys.stderr, flush=True)
            self._said = stage

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    main()

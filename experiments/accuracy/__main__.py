"""Is a plan as accurate as FP32? Every way to train on two unequal ranks, paired by seed.

    python -m qsync.experiments.accuracy --out FOLDER
    python -m qsync.experiments.accuracy --out FOLDER --task resnet --seeds 5 --processes 2

Each run is a piece, so that hours can be made up of minutes. Ways that compute the same share their runs.
The ranks stand for an A100 and a card at 0.6 of its speed: plans and seconds are simulated from the data
sheet; the kernels that train are real.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.experiments.accuracy import report
from qsync.experiments.accuracy.methods import METHODS, methods_of
from qsync.experiments.accuracy.tasks import TASKS, task_named
from qsync.experiments.accuracy.training import TrainingRun, train_start, trained, trained_on_ranks
from qsync.experiments.harness import Beside, Experiment, Fresh, Out, Page, Publish, run_command
from qsync.experiments.harness.processes import in_fresh_process
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.speedup.ways import DDP, QSYNC, WEAK_INT8

_PAGE = Page(Path("docs/results/accuracy.md"))
_TINY_STEPS = 4
# What is trained on real ranks, too, with the first seed.
REAL = (("gpt", QSYNC), ("resnet", WEAK_INT8))
_SAME = 0.02  # numbers of steps that differ by no more are one run


def main(
    out: Out = Path("accuracy"),
    task: Annotated[list[str] | None, typer.Option(help="Only this task; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each.")] = 5,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    kept: Annotated[bool, typer.Option("--kept", help="Measure nothing; report what there is.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few steps: to try the command.")] = False,
    publish: Publish = False,
    beside: Beside = False,
    fresh: Fresh = False,
) -> None:
    """Train every task by every method and seed that has no result yet, and report all there is."""
    for name in task or ():
        task_named(name)
    experiment = Experiment("accuracy", out, settings={"tiny": tiny}, fresh=fresh and not kept)
    chosen = [name for name in TASKS if name in (task or TASKS)]
    real = [(name, method) for name, method in REAL if name in chosen]
    with experiment.progress():
        if not kept:
            _measure(experiment, chosen, real, seeds, processes, tiny)
    experiment.fresh = False  # what was measured now is what there is
    tasks = {name: found for name in chosen if (found := _task(experiment, name, seeds, tiny))}
    on_ranks = [found for name, method in real if (found := _real(experiment, name, method, tiny))]
    experiment.check_measured()
    bars = report.bars(tasks, on_ranks)
    missing = [name for name in chosen if name not in tasks or not tasks[name]["runs"][report.STEPS]]
    page = replace(_PAGE.beside() if beside else _PAGE, note=report.note(bars, tasks, missing))
    experiment.finish(
        {"tasks": tasks, "real_ranks": on_ranks, "not_finished": missing}, bars=bars,
        tables=[report.table(tasks)],
        measured="losses are measured; plans and seconds are simulated from a data sheet",
        page=page if publish else None,
    )  # fmt: skip


def _measure(
    experiment: Experiment,
    tasks: Sequence[str],
    real: Sequence[tuple[str, str]],
    seeds: int,
    processes: int,
    tiny: bool,
) -> None:
    """Measure every piece that is missing."""
    methods = {
        name: experiment.piece(f"methods {name}", partial(in_fresh_process, methods_of, name, tiny))
        for name in tasks
    }
    starts = {
        f"start {name} seed {seed}": _run(experiment, name, methods[name][DDP], seed, 0, tiny)
        for seed in range(seeds) for name in tasks if task_named(name).start is not None
    }  # fmt: skip
    for _ in experiment.pieces(starts, train_start, processes):
        pass
    wanted = {
        _key(name, methods[name][method], seed, steps): _run(
            experiment, name, methods[name][method], seed, steps, tiny
        )
        for at in (report.STEPS, report.SECONDS)
        for seed in range(seeds)  # a seed of all tasks before the next: what is cut is even
        for name in tasks
        for method in METHODS
        for steps in (_steps(name, methods[name], method, tiny)[at],)
    }
    for _ in experiment.pieces(wanted, trained, processes):
        pass
    for name, method in real:
        run = _run(experiment, name, methods[name][method], 0, _num_steps(name, tiny), tiny)
        experiment.piece(f"real ranks {name} {_digest(run.method)}", partial(_on_ranks, run))


def _run(experiment: Experiment, task: str, method: Any, seed: int, steps: int, tiny: bool) -> TrainingRun:
    return TrainingRun(task, method, seed, steps, experiment.out / "starts", tiny)


def _on_ranks(run: TrainingRun) -> dict[str, Any]:
    """Make a run on two real ranks of this machine."""
    fields = {**asdict(run), "starts": str(run.starts.absolute())}
    config = {"run": fields}
    found: dict[str, Any] = run_on_ranks(trained_on_ranks, config, command="accuracy", timeout_s=900.0)
    return found


def _real(experiment: Experiment, task: str, method: str, tiny: bool) -> dict[str, Any] | None:
    """Return the final losses of a run on real ranks and in one process; None where one is missing."""
    methods = experiment.kept(f"methods {task}")
    if methods is None:
        return None
    of = methods["result"][method]
    ranks = experiment.kept(f"real ranks {task} {_digest(of)}")
    process = experiment.kept(_key(task, of, 0, _num_steps(task, tiny)))
    if ranks is None or process is None:
        return None
    losses = {"real": ranks["result"]["final_loss"], "one_process": process["result"]["final_loss"]}
    return {"task": task, "method": method, **losses}


def _key(task: str, method: Any, seed: int, steps: int) -> str:
    return f"{task} {_digest(method)} seed {seed} steps {steps}"


def _digest(method: Any) -> str:
    """Return a name of what a method computes: its precisions and samples, not its predicted seconds."""
    computed = json.dumps([method["assignments"], method["samples"]], sort_keys=True)
    return hashlib.sha256(computed.encode()).hexdigest()[:12]


def _num_steps(task: str, tiny: bool) -> int:
    return _TINY_STEPS if tiny else task_named(task).steps


def _steps(task: str, methods: Any, method: str, tiny: bool) -> dict[str, int]:
    """Return the steps of a run at equal steps, and at the seconds that the plan takes for them."""
    steps = _num_steps(task, tiny)
    in_time = round(steps * methods[QSYNC]["step_s"] / methods[method]["step_s"])
    return {
        report.STEPS: steps,
        report.SECONDS: steps if abs(in_time / steps - 1) <= _SAME else max(in_time, 1),
    }


def _task(experiment: Experiment, name: str, seeds: int, tiny: bool) -> dict[str, Any] | None:
    """Return what there is of a task: the runs of the seeds that every method has finished.

    None without its methods.
    """
    kept = experiment.kept(f"methods {name}")
    if kept is None:
        return None
    methods, runs = kept["result"], dict[str, Any]()
    for at in (report.STEPS, report.SECONDS):
        runs[at] = {method: {} for method in METHODS}
        for seed in range(seeds):
            found = [
                experiment.kept(_key(name, methods[method], seed, _steps(name, methods, method, tiny)[at]))
                for method in METHODS
            ]
            if None not in found:
                for method, piece in zip(METHODS, found, strict=True):
                    runs[at][method][str(seed)] = piece["result"] if piece else None
        if not runs[at][DDP]:
            runs[at] = {}
    job = task_named(name)
    found_here = {
        "methods": methods, "runs": runs, "steps": _num_steps(name, tiny), "family": job.family or name,
    }  # fmt: skip
    return {**found_here, "description": job.workload().description}


if __name__ == "__main__":
    run_command(main)

"""Is a plan as accurate as FP32? Every way to train on two unequal ranks, paired by seed.

    python -m qsync.experiments.accuracy --out FOLDER
    python -m qsync.experiments.accuracy --out FOLDER --task resnet --seeds 5 --processes 2

Each run is a piece, so that hours can be made up of minutes. The weak rank has half of this machine's speed
(steps are simulated from a measured profile); its kernels are real.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.experiments.accuracy import report
from qsync.experiments.accuracy.methods import METHODS, methods_of
from qsync.experiments.accuracy.tasks import TASKS, task_named
from qsync.experiments.accuracy.training import TrainingRun, trained, trained_on_ranks
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, run_command
from qsync.experiments.harness.processes import in_fresh_process
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.speedup.ways import QSYNC, WEAK_INT8

_PAGE, _PICTURE = Path("docs/results/accuracy.md"), Path("docs/figures/accuracy.png")
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
    fresh: Fresh = False,
) -> None:
    """Train every task by every method and seed that has no result yet, and report all there is."""
    for name in task or ():
        task_named(name)
    experiment = Experiment("accuracy", out, settings={"tiny": tiny}, fresh=fresh)
    chosen = [name for name in TASKS if name in (task or TASKS)]
    real = [(name, method) for name, method in REAL if name in chosen]
    with experiment.progress():
        methods = {
            name: experiment.piece(f"methods {name}", partial(in_fresh_process, methods_of, name, tiny))
            for name in chosen
        }
        wanted: dict[str, TrainingRun] = {}
        for seed in range(seeds):  # a seed of all tasks before the next: what is cut is balanced
            for name in chosen:
                for method in METHODS:
                    for steps in _steps(name, methods[name], method, tiny).values():
                        wanted[_key(name, method, seed, steps)] = TrainingRun(
                            name, methods[name][method], seed, steps, out / "starts", tiny
                        )
        if not kept:
            for _ in experiment.pieces(wanted, trained, processes):
                pass
            for name, method in real:
                steps = _num_steps(name, tiny)
                run = TrainingRun(name, methods[name][method], 0, steps, out / "starts", tiny)
                experiment.piece(f"real ranks {name} {method}", partial(_on_ranks, run))
    tasks = {name: _task(experiment, name, methods[name], seeds, tiny) for name in chosen}
    on_ranks = [found for name, method in real if (found := _real(experiment, name, method, tiny))]
    tables, bars = report.tables(tasks), report.bars(tasks, on_ranks)
    experiment.finish(
        {"tasks": tasks, "real_ranks": on_ranks}, bars=bars, tables=tables, picture=report.draw,
        measured="losses are measured; seconds are simulated from a measured profile",
        page=Page(_PAGE, _PICTURE, "One thread a rank.") if publish else None,
    )  # fmt: skip


def _on_ranks(run: TrainingRun) -> dict[str, Any]:
    """Make a run on two real ranks of this machine."""
    fields = {**asdict(run), "starts": str(run.starts.absolute())}
    config = {"run": fields}
    found: dict[str, Any] = run_on_ranks(trained_on_ranks, config, command="accuracy", timeout_s=900.0)
    return found


def _real(experiment: Experiment, task: str, method: str, tiny: bool) -> dict[str, Any] | None:
    """Return the final losses of a run on real ranks and in one process; None where one is missing."""
    ranks = experiment.kept(f"real ranks {task} {method}")
    process = experiment.kept(_key(task, method, 0, _num_steps(task, tiny)))
    if ranks is None or process is None:
        return None
    losses = {"real": ranks["result"]["final_loss"], "one_process": process["result"]["final_loss"]}
    return {"task": task, "method": method, **losses}


def _key(task: str, method: str, seed: int, steps: int) -> str:
    return f"{task} {method} seed {seed} steps {steps}"


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


def _task(experiment: Experiment, name: str, methods: Any, seeds: int, tiny: bool) -> dict[str, Any]:
    """Return what there is of a task: the runs of the seeds that every method has finished."""
    runs: dict[str, Any] = {}
    for at in (report.STEPS, report.SECONDS):
        by_seed = {
            str(seed): [
                experiment.kept(_key(name, method, seed, _steps(name, methods, method, tiny)[at]))
                for method in METHODS
            ]
            for seed in range(seeds)
        }
        whole = {seed: found for seed, found in by_seed.items() if None not in found}
        runs[at] = {
            method: {seed: piece["result"] for seed, found in whole.items() if (piece := found[number])}
            for number, method in enumerate(METHODS if whole else ())
        }
    found = {"methods": methods, "runs": runs, "steps": _num_steps(name, tiny)}
    return {**found, "curves": report.curves(found), "description": task_named(name).workload().description}


if __name__ == "__main__":
    run_command(main)

"""Compare the final accuracy of every way to train on two unequal ranks, paired by seed.

    python -m qsync.experiments.accuracy --out FOLDER
    python -m qsync.experiments.accuracy --out FOLDER --task resnet --seeds 5 --processes 2

Each run is a piece, so an interrupted run continues. Ways with equal computations share their runs. The ranks
represent an A100 and a card at 0.6 of its speed: plans and seconds are simulated from the data sheet; the
training kernels are real.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.experiments.accuracy import report
from qsync.experiments.accuracy.methods import METHODS, methods_of
from qsync.experiments.accuracy.tasks import TASKS, task_named
from qsync.experiments.accuracy.training import TrainingRun, trained
from qsync.experiments.harness import Beside, Experiment, Fresh, Out, Page, Publish, run_command
from qsync.experiments.harness.processes import in_fresh_process

_PAGE = Page(Path("docs/results/accuracy.md"))
_TINY_STEPS = 4


def main(
    out: Out = Path("accuracy"),
    task: Annotated[list[str] | None, typer.Option(help="Only this task; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each.")] = 5,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few steps: to try the command.")] = False,
    publish: Publish = False,
    beside: Beside = False,
    fresh: Fresh = False,
) -> None:
    """Train every task by every method and seed without a result, and report all results."""
    for name in task or ():
        task_named(name)
    experiment = Experiment("accuracy", out, settings={"tiny": tiny}, fresh=fresh)
    chosen = [name for name in TASKS if name in (task or TASKS)]
    with experiment.progress():
        methods = {
            name: experiment.piece(f"methods {name}", partial(in_fresh_process, methods_of, name, tiny))
            for name in chosen
        }
        wanted = {  # all tasks of a seed before the next seed, so that an interrupted run is balanced
            (name, seed): _runs(name, methods[name], seed, tiny) for seed in range(seeds) for name in chosen
        }
        runs = {key: run for of in wanted.values() for key, run in of.values()}
        results = dict(experiment.pieces(runs, trained, processes))
    tasks = {
        name: {
            "methods": methods[name],
            "runs": {
                method: {str(seed): results[wanted[name, seed][method][0]] for seed in range(seeds)}
                for method in METHODS
            },
            "steps": _TINY_STEPS if tiny else task_named(name).steps,
            "description": task_named(name).workload().description,
        }
        for name in chosen
    }
    bars = report.bars(tasks)
    page = replace(_PAGE.beside() if beside else _PAGE, note=report.note(bars, tasks))
    experiment.finish(
        {"tasks": tasks}, bars=bars, tables=[report.table(tasks)],
        measured="losses are measured; plans and seconds are simulated from a data sheet",
        page=page if publish else None,
    )  # fmt: skip


def _runs(task: str, methods: Mapping[str, Any], seed: int, tiny: bool) -> dict[str, tuple[str, TrainingRun]]:
    """Return every method with the name of its run's piece."""
    steps, found = _TINY_STEPS if tiny else task_named(task).steps, {}
    for name in METHODS:
        method = methods[name]
        # Named by precisions and samples, so that methods with equal computations share a piece.
        computed = json.dumps([method["assignments"], method["samples"]], sort_keys=True)
        digest = hashlib.sha256(computed.encode()).hexdigest()[:12]
        run = TrainingRun(task, method, seed, steps)
        found[name] = f"{task} {digest} seed {seed} steps {steps}", run
    return found


if __name__ == "__main__":
    run_command(main)

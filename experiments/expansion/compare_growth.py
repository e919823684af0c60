"""Measure savings by growing: `python -m qsync.experiments.expansion.compare_growth --out FOLDER`.

For each workload and seed a small model is trained, expanded and trained on: a byte-level GPT on the source
of Python's standard library, a ViT on digits. The measure is tokens (images) until the final held-out loss of
the large model from scratch, without and with the source's own.

Models train on one thread each, `--processes` of them in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from qsync import QSyncError
from qsync.experiments.expansion.growth_report import bars, summary, table
from qsync.experiments.expansion.growth_subjects import SETTINGS, Setting, setting
from qsync.experiments.expansion.training_runs import Method, run, source_path
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, run_command

# With the fraction of from-scratch steps that the expanded model gets.
METHODS = (Method("expanded", 0.5), Method("expanded", 0.3))
_PAGE = Page(Path("docs/results/growing.md"), note="One thread a run.")

Task = tuple[Setting, Method, int]


def main(
    out: Out,
    workloads: Annotated[
        list[str], typer.Option("--workload", help="gpt, vit; repeat for both.")
    ] = list(SETTINGS),  # noqa: B006
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    processes: Annotated[int, typer.Option(help="Runs at a time, one thread each.")] = 2,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:  # fmt: skip
    """Train missing runs, then write figures.json and .md and print the table."""
    if seeds < 1 or processes < 1:
        raise QSyncError("--seeds and --processes must be at least 1; correct them")
    settings = [setting(name) for name in dict.fromkeys(workloads)]
    torch.set_num_threads(1)
    experiment = Experiment("expansion", out, fresh=fresh)

    def trained(methods: Sequence[Method]) -> list[dict[str, Any]]:
        tasks = [(of, method, seed) for method in methods for seed in range(seeds) for of in settings]
        return train_all(experiment, tasks, processes)

    with experiment.progress():
        rows = trained([Method("scratch"), Method("source")])
        rows += trained(METHODS)
    found = summary(rows)
    figures = {
        "seeds": list(range(seeds)), "settings": [asdict(of) for of in settings], "summary": found,
        "rows": rows,
    }  # fmt: skip
    experiment.finish(
        figures, measured="held-out losses", bars=bars(found),
        tables=[table(found)], page=_PAGE if publish else None,
    )  # fmt: skip


def train_all(experiment: Experiment, tasks: Sequence[Task], processes: int = 1) -> list[dict[str, Any]]:
    """Return the rows of all tasks in order; train those missing in the folder."""
    named = {name_of(task): (task, experiment.out) for task in tasks}
    for name, ((of, method, seed), out) in named.items():
        if method.start == "source" and not source_path(out, of, seed).exists():
            experiment.forget(name)
    rows = dict(experiment.pieces(named, _trained, processes, lambda task: asdict(task[0][0])))
    return [rows[name] for name in named]


def name_of(task: Task) -> str:
    """Return the name of a run: workload, seed and method."""
    of, method, seed = task
    return f"{of.workload}, seed {seed}, {method.name}"


def _trained(task: tuple[Task, Path]) -> dict[str, Any]:
    """Train one run in the current process."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    (of, method, seed), out = task
    return run(of, method, seed, out)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_command(main)

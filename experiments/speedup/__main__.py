"""Measure the samples per second that a weak card adds, in every way to use it.

    python -m qsync.experiments.speedup --out FOLDER
    python -m qsync.experiments.speedup --out FOLDER --model gpt-small

Two real ranks of this machine, the weak one at a share of its core (emulated), take turns at every way. Pairs
of GPUs are simulated from their data sheets.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from qsync import QSyncError
from qsync.experiments.allocation.bases import MeasuredModel, measure
from qsync.experiments.harness import Experiment, Page, run_command
from qsync.experiments.harness.options import Fresh, Models, Out, Publish
from qsync.experiments.mixed.launch import run_demo
from qsync.experiments.mixed.rank import STEPS_A_TURN
from qsync.experiments.mixed.ways import ways
from qsync.experiments.speedup import report
from qsync.experiments.workloads.subjects import DEMO_NAMES
from qsync.replayer import Recapture

SHARES = (0.2, 0.35, 0.5, 0.7, 0.85)
MODELS, SIMULATED = ("gpt-small", "bert", "resnet"), "gpt"
PAIRS = (("A100", "T4"), ("H100", "L4"), ("V100", "T4"))
_PROFILE_S, _TURNS, _ROUNDS, _APART = 30.0, 9, 2, 4
_PAGE, _PICTURE = Path("docs/results/speedup.md"), Path("docs/figures/speedup.png")
_ABOUT = "columns of shares are measured, and the weak rank emulated; pairs of GPUs are simulated"


def main(
    out: Out = Path("speedup"),
    model: Models = None,
    share: Annotated[
        list[float] | None, typer.Option(help="Only this speed of the weak card; repeatable.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of every way.")] = _TURNS,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Compare every way at every share; an interrupted run continues."""
    names = model or MODELS
    for name in names:
        if name not in DEMO_NAMES:
            raise QSyncError(f"unknown model {name!r}; choose from {', '.join(DEMO_NAMES)}")
    if publish and (share or turns < _TURNS):
        raise QSyncError(f"only all shares with {_TURNS} turns are published; leave out --share and --turns")
    torch.set_num_threads(1)
    experiment, problems = Experiment("speedup", out, settings={"turns": turns}, fresh=fresh), []
    with experiment.progress():
        for name in names:
            for weak in share or SHARES:
                make = partial(_measured, out / "runs" / f"{name}-{weak}", name, weak, turns)
                problems.append(experiment.piece(f"{name} at {weak}", make))
        folder = out / SIMULATED
        experiment.piece(f"profile {SIMULATED}", partial(measure, SIMULATED, folder, seconds=_PROFILE_S))
        for pair in PAIRS:
            make = partial(_simulated, folder, pair)
            problems.append(experiment.piece(f"{SIMULATED} on {'-'.join(pair)}", make))
    bars = report.bars(problems)
    page = Page(_PAGE, report.note(bars)) if publish else None
    experiment.finish(
        {"problems": problems}, bars=bars, tables=[report.table(problems)], measured=_ABOUT, page=page
    )
    report.draw(problems, _PICTURE if publish else out / "figures.png")


def _measured(folder: Path, name: str, share: float, turns: int) -> dict[str, Any]:
    """Train in every way on two real ranks, the weak one with a share of its core."""
    steps = turns * STEPS_A_TURN
    found = run_demo(
        workload=name, weak_share=share, steps=steps, rounds=_ROUNDS, turns_a_round=_APART, out=folder
    )
    kept = {way: report.measured_row(run) for way, run in found["runs"].items()}
    return {"model": name, "share": share, "ways": kept, "bars": found["bars"]}


def _simulated(folder: Path, pair: tuple[str, str]) -> dict[str, Any]:
    """Replay every way for two GPUs from their data sheets."""
    model = MeasuredModel.load(folder)
    basis = model.on_cards(pair)
    samples = basis.graph.batch_shapes[0][0]
    plans = ways(basis, Recapture(model.graph, {}))
    found = {way: report.simulated_row(plan, basis.cluster, samples) for way, plan in plans.items()}
    return {"model": folder.name, "pair": " + ".join(pair), "ways": found}


if __name__ == "__main__":
    run_command(main)

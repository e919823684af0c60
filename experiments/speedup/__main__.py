"""How many more samples per second a weak card brings, by every way to use it.

    python -m qsync.experiments.speedup --out FOLDER
    python -m qsync.experiments.speedup --out FOLDER --model gpt

Models are profiled on this machine. Steps of two ranks, the weak one at a share of the fast one's speed, are
replayed (simulated) at every share, and measured on two real ranks at some. Steps of 4 and 8 ranks, and of
pairs of GPUs from their data sheets, are simulated.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from qsync import QSyncError
from qsync.experiments.allocation.bases import MeasuredModel, measure
from qsync.experiments.harness import Experiment, Page, run_command
from qsync.experiments.harness.options import Fresh, Models, Out, Publish
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.speedup import ranks, report
from qsync.experiments.speedup.ways import ways
from qsync.experiments.workloads.subjects import NAMES
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Recapture

SHARES, MEASURED = (0.2, 0.35, 0.5, 0.7, 0.85), (0.35, 0.5, 0.7)
MODELS = ("gpt", "bert", "resnet")
PAIRS = (("A100", "T4"), ("H100", "L4"), ("V100", "T4"))
_RANKS = (4, 8)
_PROFILE_S, _TURNS, _STEPS = 30.0, 3, 8  # of each model; of each way, and the steps of a turn
_PAGE, _PICTURE = Path("docs/results/speedup.md"), Path("docs/figures/speedup.png")
_ABOUT = "profiles, and rows called measured; all else is simulated, and the weak rank emulated"


def main(
    out: Out = Path("speedup"),
    model: Models = None,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Compare every way at every share; an interrupted run continues."""
    names = model or MODELS
    for name in names:
        if name not in NAMES:
            raise QSyncError(f"there is no model {name!r}; choose from {', '.join(NAMES)}")
    torch.set_num_threads(1)
    experiment, problems = Experiment("speedup", out, settings={"seconds": _PROFILE_S}, fresh=fresh), []
    with experiment.progress():
        for name in names:
            folder = out / name
            experiment.piece(f"profile {name}", partial(measure, name, folder, seconds=_PROFILE_S))
            for of in SHARES:
                make = partial(_replayed, folder, of, 1)
                problems.append(experiment.piece(f"{name} at {of}", make))
            for num in _RANKS:
                make = partial(_replayed, folder, 0.5, num // 2)
                problems.append(experiment.piece(f"{name} on {num} ranks", make))
            for pair in PAIRS:
                make = partial(_simulated, folder, pair)
                problems.append(experiment.piece(f"{name} on {'-'.join(pair)}", make))
        for name in names:
            for of in MEASURED:
                problems.append(experiment.piece(f"{name} measured at {of}", partial(_measured, name, of)))
    bars = report.bars(problems)
    page = Page(_PAGE, report.note(bars, problems)) if publish else None
    experiment.finish(
        {"problems": problems}, bars=bars, tables=[report.table(problems)], measured=_ABOUT, page=page
    )
    report.draw(problems, _PICTURE if publish else out / "figures.png")


def _replayed(folder: Path, share: float, count: int) -> dict[str, Any]:
    """Replay every way for so many ranks of this machine and as many of a share of it."""
    model = MeasuredModel.load(folder)
    basis = model.beside_share(share, count)
    found = _rows(ways(basis, Recapture(model.large, {})), basis)
    return {"model": folder.name, "share": share, "ranks": 2 * count, "ways": found}


def _simulated(folder: Path, pair: tuple[str, str]) -> dict[str, Any]:
    """Replay every way for two GPUs as their data sheets have them."""
    model = MeasuredModel.load(folder)
    basis = model.on_cards(pair)
    found = _rows(ways(basis, Recapture(model.graph, {})), basis)
    return {"model": folder.name, "pair": " + ".join(pair), "ranks": 2, "ways": found}


def _measured(name: str, share: float) -> dict[str, Any]:
    """Measure every way on two real ranks, the weak one with a share of its core."""
    config = {"model": name, "weak_share": share, "turns": _TURNS, "steps": _STEPS}
    found = run_on_ranks(ranks.measure, config, command="speedup", timeout_s=600.0)
    return {"model": name, "share": share, "ranks": 2, "measured": True, "ways": found}


def _rows(plans: dict[str, Plan], basis: Basis) -> dict[str, Any]:
    samples = basis.graph.batch_shapes[0][0]
    return {way: report.row(plan, basis.cluster, samples) for way, plan in plans.items()}


if __name__ == "__main__":
    run_command(main)

"""Plan for a weak rank of little memory in every way there is, and measure the joint plans on real ranks.

    python -m qsync.experiments.small_memory --out FOLDER

Two real ranks of this machine profile each model, the weak one at half a core (emulated). Every way is
planned for budgets from all of FP32's peak down to 30 % of it, and replayed. The joint plans of the two least
budgets that they fit train on the ranks. The last piece trains a small model with one lever at a time.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync import QSyncError
from qsync.experiments.harness import Experiment, Page, run_command
from qsync.experiments.harness.options import Fresh, Models, Out, Publish
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.small_memory import report
from qsync.experiments.small_memory.ranks import LEVERS, MODELS, PARTS, TINY, measure, measure_levers

_PAGE, _PICTURE = Path("docs/results/levers.md"), Path("docs/figures/small_memory.png")
_ABOUT = "budgets are replayed with profiles of two real ranks; the joint plans of two budgets are measured"
_TIMEOUT_S = 1800.0


def main(
    out: Out = Path("small_memory"),
    model: Models = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size: to try the command.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Plan and measure every model, and judge the plans; an interrupted run continues."""
    names = [TINY] if tiny else list(model or MODELS)
    for name in names:
        if name not in (*MODELS, TINY):
            raise QSyncError(f"unknown model {name!r}; choose from {', '.join(MODELS)}")
    settings: dict[str, Any] = {"tiny": tiny, "turns": 1, "steps": 2, "profile_s": 0.0, "limit_s": 5.0}
    settings |= {"parts": (1.0, 0.7)}
    if not tiny:
        settings |= {"weak_share": 0.5, "turns": 2, "steps": 9, "profile_s": 8.0, "parts": PARTS}
    experiment = Experiment("small_memory", out, settings=settings, fresh=fresh)

    def on_ranks(work: Any, name: str) -> Any:
        config = {**settings, "model": name}
        return run_on_ranks(work, config, command="small_memory", timeout_s=_TIMEOUT_S)

    with experiment.progress():
        found = {name: experiment.piece(name, partial(on_ranks, measure, name)) for name in names}
        levers = experiment.piece("levers", partial(on_ranks, measure_levers, TINY if tiny else LEVERS))
    report.draw(found, _PICTURE if publish else experiment.out / "figures.png")
    experiment.finish(
        {"models": found, "levers": levers}, bars=report.bars(found), measured=_ABOUT,
        tables=[
            report.table(found), report.trained_table("Plans of every lever", report.measured(found)),
            report.trained_table("FP32 with one lever, GPT of 3.3 M", levers.items()),
        ],
        page=Page(_PAGE, report.NOTE) if publish else None,
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)

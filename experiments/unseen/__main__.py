"""Measure the suite of unseen models: speed beside peers, predicted steps and predicted memory.

    python -m qsync.experiments.unseen --out FOLDER

Every family is measured in separate processes, and every part of it is a piece. `--only` also accepts the
larger models of qsync.experiments.gpu. Held-out families are measured on request only, and marked in the
report. `--publish` writes the table into `docs/results/unseen.md`; `--beside` writes it below, for a second
kind of processor. `--reports` reads a folder of fingerprints (`qsync doctor --report`) instead, and measures
nothing: a table for each processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.errors import QSyncError
from qsync.experiments.harness import Experiment, Page, run_command, show
from qsync.experiments.harness.options import Beside, Fresh, Out, Publish
from qsync.experiments.harness.processes import in_fresh_process
from qsync.experiments.unseen import family_runs, fingerprints, report
from qsync.experiments.workloads.families import HELD_OUT, HELD_OUT_SEED, LARGE, SEEN, family_named

_PAGE = Page(Path("docs/results/unseen.md"), note="One thread.")
_PARTS, _SEED = ("speed", "prediction", "memory"), 0
_RANKS = "ranks"  # two ranks at once, on request only, because they need two cores
_COMPILED = "compiled"  # steps under torch.compile, for GPUs
_EVERY = (*_PARTS, _RANKS, _COMPILED)
_PARTS_HELP = f"{', '.join(_PARTS)} (all if left out), {_RANKS}, or {_COMPILED}."
_ROUNDS, _PLANS = 9, 8  # rounds of timed steps, and random plans to predict; one each with --tiny


def main(
    out: Out = Path("unseen"),
    only: Annotated[list[str] | None, typer.Option(help="Only this family; repeat for several.")] = None,
    part: Annotated[list[str] | None, typer.Option(help=_PARTS_HELP)] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="Measure these families too.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    tiny: Annotated[bool, typer.Option("--tiny", help="Models of no size: to try the command.")] = False,
    kept: Annotated[bool, typer.Option("--kept", help="Report what --out has; measure nothing.")] = False,
    beside: Beside = False,
    reports: Annotated[
        Path | None, typer.Option(help="Folder of fingerprints to show, written by qsync doctor --report.")
    ] = None,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Measure the suite and judge it; an interrupted run continues."""
    if reports is not None:
        fingerprints.show_all(reports, out, fresh, _PAGE if publish else None)
        return
    for name in only or ():
        if family_named(name).held_out and not held_out:
            raise QSyncError(f"{name} is held out; add --held-out, and do not tune on its results")
    for name in part or ():
        if name not in _EVERY:
            raise QSyncError(f"unknown part {name!r}; choose from {', '.join(_EVERY)}")
    experiment = Experiment(
        "unseen", out, settings={"tiny": tiny, "device": device}, fresh=fresh and not kept, seed=_SEED
    )
    show(f"Held out by seed {HELD_OUT_SEED}: {', '.join(HELD_OUT)}.")
    with experiment.progress():
        seen, apart = (
            {name: found for name in names if (found := _measured(experiment, name, part or _PARTS, kept))}
            for names in (
                [name for name in (*SEEN, *LARGE) if name in (only or SEEN)],
                [name for name in HELD_OUT if held_out and name in (only or HELD_OUT)],
            )
        )
    experiment.check_measured()
    figures: dict[str, Any] = {"families": seen, "held_out": apart, "held_out_by_seed": HELD_OUT_SEED}
    bars, tables = report.all_bars(seen, apart), report.tables(seen, apart)
    page = _PAGE.beside() if beside else _PAGE
    experiment.finish(figures, bars=bars, tables=tables, page=page if publish else None)


def _measured(experiment: Experiment, name: str, parts: Sequence[str], kept: bool) -> dict[str, Any]:
    """Return a family's measurements by part; with `kept` only those in the folder."""
    tiny, device, found = experiment.settings["tiny"], experiment.settings["device"], dict[str, Any]()
    rounds, plans = (1, 1) if tiny else (_ROUNDS, _PLANS)
    runs = {
        "speed": partial(family_runs.speeds, name, rounds, tiny, device),
        "prediction": partial(
            family_runs.predicted, name, 1, plans, _SEED, tiny, str(experiment.out / "traces" / name)
        ),
        _RANKS: partial(family_runs.predicted, name, 2, plans, _SEED, tiny),
        "memory": partial(family_runs.memory, name, tiny, device),
        _COMPILED: partial(family_runs.compiled_steps, name, rounds, tiny, device),
    }
    for part in parts:
        run = runs[part]
        if kept:
            content = experiment.kept(f"{part} {name}")
            found[part] = content and content["result"]
        else:
            found[part] = experiment.piece(f"{part} {name}", partial(in_fresh_process, run.func, *run.args))
    return {part: result for part, result in found.items() if result is not None}


if __name__ == "__main__":
    run_command(main)

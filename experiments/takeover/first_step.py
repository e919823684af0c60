"""Measure seconds until the first step of ten scripts: plain, and qsync's first and second start.

    python -m qsync.experiments.takeover.first_step --out FOLDER

Each start is a separate job of two ranks, in turns. Kernels are built before; the first start finds no cached
plan, the second the first's. `--publish` writes the promises into `docs/results/takeover.md`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.errors import FormatError
from qsync.experiments.clients.conversions import CLIENTS, Client
from qsync.experiments.clients.start import ObservedRank, run_client
from qsync.experiments.harness import Bar, Experiment, Fresh, Out, Page, Publish, bar, run_command

_PAGE = Page(Path("docs/results/takeover.md"), marker="first")
# Allowed seconds beyond plain DDP until the first step: the first start's, and the second's.
_FIRST_S, _FIRST_STEPS, _SECOND_S = 20.0, 40, 3.0
_STEPS = 8  # steps of each start
_PLAIN, _FIRST, _SECOND = STARTS = ("plain", "first", "second")
_BUILD = "from qsync.backend.build_ahead import build; list(build([]))"


def main(
    out: Out = Path("first_step"),
    client: Annotated[list[str] | None, typer.Option(help="Only this script; repeat for several.")] = None,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Start every script plain and with qsync, in turns; compare the ends of their first steps."""
    for name in client or ():
        if name not in CLIENTS:
            raise FormatError(f"unknown script {name}; choose from {', '.join(CLIENTS)}")
    experiment = Experiment("first step", out, settings={"steps": _STEPS}, fresh=fresh)
    work = experiment.out / "work"
    with experiment.progress():
        found = {}
        for name in client or CLIENTS:
            found[name] = experiment.piece(name, partial(_measured, CLIENTS[name], work))
    page = _PAGE if publish else None
    experiment.finish({"clients": found}, bars=bars(found), page=page)


def _measured(client: Client, work: Path) -> dict[str, Any]:
    """Return the seconds of each kind of start, on the later rank."""
    caches = work / "caches"
    environment = {"QSYNC_CACHE_DIR": str(caches), "XDG_CACHE_HOME": str(caches / client.name)}
    subprocess.run([sys.executable, "-c", _BUILD], check=True, env={**os.environ, **environment})
    shutil.rmtree(caches / client.name, ignore_errors=True)
    found: dict[str, Any] = {"lines_changed": client.lines_changed()}
    for kind in (_PLAIN, *STARTS):  # the first brings the script's packages from the disk, and does not count
        folder = work / client.name / kind
        ranks = run_client(client, folder, qsync=kind != _PLAIN, steps=_STEPS, environment=environment)
        found[kind] = _of_start(ranks)
    return found


def _of_start(ranks: list[ObservedRank]) -> dict[str, float]:
    return {
        "first_step_s": max(rank.first_step_s() for rank in ranks),
        "step_s": max(rank.step_s() for rank in ranks),
    }


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """Return the bars: seconds of each start beyond plain DDP's, against the limits."""
    stated = []
    for name, row in found.items():
        limit_s = max(_FIRST_S, _FIRST_STEPS * row[_PLAIN]["step_s"])
        stated += [
            bar(f"{name}: first start beyond plain, s", beyond(row, _FIRST), limit_s),
            bar(f"{name}: second start beyond plain, s", beyond(row, _SECOND), _SECOND_S),
        ]
    return stated


def beyond(row: Mapping[str, Any], kind: str) -> float:
    """Return the seconds by which a start exceeds plain DDP's, until the first step."""
    return float(row[kind]["first_step_s"] - row[_PLAIN]["first_step_s"])


if __name__ == "__main__":
    run_command(main)

"""Every claim about GPUs, proved or disproved on one.

    make gpu
    python -m qsync.experiments.gpu --minutes 9 --out gpu-out
    python -m qsync.experiments.gpu --device cpu --tiny      # a dry run of every piece, on a CPU

The pieces run most valuable first, each in processes of its own, until the minutes are over. A run that was
cut, at any moment, goes on with the pieces that have no result yet; one that failed is tried again.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import typer

from qsync import QSyncError
from qsync.backend.gpu_state import gpu_states
from qsync.errors import UnsupportedError, shortened
from qsync.experiments.gpu import report
from qsync.experiments.gpu.commands import run_within
from qsync.experiments.gpu.pieces import Piece, pieces
from qsync.experiments.harness import Experiment, Fresh, Out, run_command
from qsync.records.json_files import read_json

_LEAST_S = 10.0  # that are left for a piece to be begun
_BUSY_MIB, _BUSY_PER_CENT = 1024, 10  # of a GPU that nobody else uses


def main(
    out: Out = Path("gpu-out"),
    minutes: Annotated[float, typer.Option(min=0.1, help="When these are over, no piece goes on.")] = 9.0,
    device: Annotated[str, typer.Option(help="cuda; cpu is a dry run of every piece.")] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help="Only this group of pieces; repeatable.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Models of no size.")] = False,
    fresh: Fresh = False,
) -> None:
    """Measure what is missing, most valuable first, and report all there is."""
    end = time.monotonic() + 60 * minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the piece that runs is ended on the way out
    _check(device)
    settings = {"device": device, "tiny": tiny}
    experiment = Experiment("gpu", out, settings=settings, fresh=fresh)
    every = pieces(out.absolute(), device, tiny)
    groups = list(dict.fromkeys(piece.group for piece in every))
    for group in only or ():
        if group not in groups:
            raise QSyncError(f"there is no group {shortened(group)}; choose from {', '.join(groups)}")
    found: dict[str, Any] = {}
    figures: dict[str, Any] = {"doubts": _doubts() if device == "cuda" else [], "pieces": found}
    measured = "on a GPU" if device == "cuda" else "a dry run on a CPU: no figure is of a GPU"
    with experiment.progress():
        for piece in every:
            if not only or piece.group in only:
                found[piece.key] = _result(experiment, piece, end)
            else:
                kept = experiment.kept(piece.key)
                found[piece.key] = kept["result"] if kept else {"not_run": "not asked for"}
            experiment.note(figures, bars=report.bars(found), measured=measured)
    figures["doubts"] += report.held_down(found)
    experiment.finish(
        figures, bars=report.bars(found), tables=report.tables(found, figures["doubts"]), measured=measured
    )


def _result(experiment: Experiment, piece: Piece, end: float) -> dict[str, Any]:
    """Return what a piece found: kept, or measured now; else why it has no result."""
    kept = experiment.kept(piece.key)
    if kept is not None:
        found: dict[str, Any] = kept["result"]
        return found
    most_s = min(piece.most_s, end - time.monotonic())
    if most_s < _LEAST_S:
        return {"not_run": "the minutes were over"}
    experiment.say(piece.key)
    piece.result.parent.mkdir(parents=True, exist_ok=True)
    before = gpu_states()
    log = experiment.out / "logs" / f"{piece.key.replace(' ', '-').replace('/', '-')}.txt"
    ended = run_within(piece.command, most_s, log)
    read = _read(piece.result)
    # Tests that fail are a result; pytest's exit code says no more than its file.
    if read is None or (ended.why_not and piece.group != "tests"):
        return {"cut" if ended.cut else "failed": ended.why_not or "it wrote no result"}
    result = {"result": read, "seconds": ended.seconds, "gpus_before": before, "gpus_after": gpu_states()}
    kept_now: dict[str, Any] = experiment.keep(piece.key, result)
    return kept_now


def _read(file: Path) -> Any:
    """Return what a piece wrote; None if it wrote nothing whole."""
    try:
        return read_json(file) if file.suffix == ".json" else _tests(file)
    except (OSError, QSyncError, json.JSONDecodeError, ElementTree.ParseError):
        return None


def _tests(file: Path) -> dict[str, Any]:
    """Return the counts of a run of pytest, and the first line of each failure."""
    cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    failed = {}
    for case in cases:
        for kind in ("failure", "error"):
            if (node := case.find(kind)) is not None:
                failed[f"{case.get('classname')}::{case.get('name')}"] = shortened(
                    (node.get("message") or "").partition("\n")[0], quote=False
                )
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def _check(device: str) -> None:
    """Raise QSyncError for a device that cannot be measured here, with the reason."""
    if device == "cpu":
        return
    if device != "cuda":
        raise QSyncError(f"--device is cuda or cpu, found {shortened(device)}")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        why = shortened(str(error).partition("\n")[0], quote=False)
        raise UnsupportedError(
            f"torch {torch.__version__} reaches no GPU ({why}); "
            "install a driver and a torch that fit, or give --device cpu for a dry run"
        ) from None


def _doubts() -> list[str]:
    """Return why figures of this GPU may be off: others use it."""
    found = []
    for row in gpu_states():
        used, load = _number(row, "memory.used"), _number(row, "utilization.gpu")
        if used > _BUSY_MIB or load > _BUSY_PER_CENT:
            found.append(
                f"{row['name']} is in use by others ({used} MiB, {load} % busy): figures of time are doubtful"
            )
    return found


def _number(row: Mapping[str, str], field: str) -> int:
    """Return a field of nvidia-smi; 0 for what it does not know ("[N/A]")."""
    text = row.get(field, "")
    return int(text) if text.isdecimal() else 0


if __name__ == "__main__":
    run_command(main)

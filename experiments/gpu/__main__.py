"""Measure every claim about GPUs on one GPU within minutes.

    make gpu
    python -m qsync.experiments.gpu --minutes 9 --out gpu-out
    python -m qsync.experiments.gpu --device cpu --tiny      # a dry run of every piece, on a CPU

Pieces run by value, each in separate processes, until the minutes are over. An interrupted run continues with
missing pieces; failed or interrupted pieces run again after all others.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import typer

from qsync import QSyncError
from qsync.backend.devices.device_detection import untested_torch
from qsync.backend.devices.gpu_state import gpu_states
from qsync.errors import UnsupportedError, shortened
from qsync.experiments.gpu import report
from qsync.experiments.gpu.commands import run_within
from qsync.experiments.gpu.pieces import Piece, pieces
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, run_command, show
from qsync.records.json_files import read_json

_PAGE = Path("docs/results/gpu.md")
_LEAST_S = 10.0  # seconds that must be left to start a piece


def main(
    out: Out = Path("gpu-out"),
    minutes: Annotated[float, typer.Option(min=0.1, help="When these are over, no piece goes on.")] = 9.0,
    device: Annotated[str, typer.Option(help="cuda; cpu is a dry run of every piece.")] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help="Only this group of pieces; repeatable.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Models of no size.")] = False,
    kept: Annotated[bool, typer.Option("--kept", help="Report what --out has; measure nothing.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Measure missing pieces, most valuable first, and report all results."""
    end = time.monotonic() + 60 * minutes
    if publish and device != "cuda":
        raise QSyncError("a dry run has no GPU figures to publish; leave out --publish")
    if not kept:
        _check(device)
    settings = {"device": device, "tiny": tiny}
    experiment = Experiment("gpu", out, settings=settings, fresh=fresh and not kept)
    every = pieces(out.absolute(), device, tiny)
    groups = list(dict.fromkeys(piece.group for piece in every))
    for group in only or ():
        if group not in groups:
            raise QSyncError(f"unknown group {shortened(group)}; choose from {', '.join(groups)}")
    wanted = [piece for piece in every if not only or piece.group in only]
    found: dict[str, Any] = {
        piece.key: _kept(experiment, piece)
        or {"not_run": "not begun" if piece in wanted else "not asked for"}
        for piece in every
    }
    figures: dict[str, Any] = {"doubts": untested_torch() if device == "cuda" else [], "pieces": found}
    if kept:
        experiment.check_measured()
        wanted = []
    measured = "on a GPU" if device == "cuda" else "a dry run on a CPU: no figure is of a GPU"
    with experiment.progress():
        # Pieces that failed before come last: they would use up the minutes of every run.
        for piece in sorted(wanted, key=lambda piece: not {"result", "not_run"} & set(found[piece.key])):
            found[piece.key] = _result(experiment, piece, end)
            experiment.note(figures, bars=report.bars(found), measured=measured)
    said = [*(f"Doubt: {doubt}" for doubt in figures["doubts"]), *report.failures(found)]
    experiment.finish(
        figures, bars=report.bars(found), tables=report.tables(found), measured=measured,
        page=Page(_PAGE, note="\n".join([report.cards(found), *said])) if publish else None,
    )  # fmt: skip
    show(*said)


def _kept(experiment: Experiment, piece: Piece) -> dict[str, Any] | None:
    """Return a piece's stored result; None if it was not run."""
    kept = experiment.kept(piece.key)
    return kept and kept["result"]


def _result(experiment: Experiment, piece: Piece, end: float) -> dict[str, Any]:
    """Return a piece's result, stored or measured now, or the reason why there is none."""
    before = _kept(experiment, piece)
    if before is not None and "result" in before:
        return before
    most_s = min(piece.most_s, end - time.monotonic())
    if most_s < _LEAST_S:
        return before or {"not_run": "the minutes were over"}
    experiment.say(piece.key)
    found: dict[str, Any] = experiment.keep(piece.key, _measured(experiment, piece, most_s))
    return found


def _measured(experiment: Experiment, piece: Piece, most_s: float) -> dict[str, Any]:
    """Run a piece; return its result, or the reason why there is none."""
    piece.result.unlink(missing_ok=True)  # of an interrupted run
    before = gpu_states()
    log = experiment.out / "logs" / f"{piece.key.replace(' ', '-').replace('/', '-')}.txt"
    ended = run_within(piece.command, most_s, log)
    if ended.cut:
        return {"cut": ended.why_not}
    read = _read(piece.result)
    # Failed tests are a result; pytest's exit code tells no more than its file.
    if read is None or (ended.why_not and piece.result.suffix != ".xml"):
        return {"failed": ended.why_not or "it wrote no result"}
    if why := report.failure(read):
        shutil.rmtree(piece.result.parent / "pieces", ignore_errors=True)  # measure again
        return {"failed": why}
    return {"result": read, "seconds": ended.seconds, "gpus_before": before, "gpus_after": gpu_states()}


def _read(file: Path) -> Any:
    """Return a piece's written or printed result; None if incomplete."""
    try:
        if file.suffix == ".txt":
            return {"printed": file.read_text(errors="replace")}
        return _tests(file) if file.suffix == ".xml" else read_json(file)
    except (OSError, QSyncError, json.JSONDecodeError, ElementTree.ParseError):
        return None


def _tests(file: Path) -> dict[str, Any]:
    """Return the counts of a pytest run, and each failure's first line."""
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
    """Raise QSyncError, with the reason, for a device that cannot be measured."""
    if device == "cpu":
        return
    if device != "cuda":
        raise QSyncError(f"--device must be cuda or cpu, found {shortened(device)}; choose one")
    try:
        torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError) as error:  # no driver, or no code for this GPU
        why = shortened(str(error).partition("\n")[0], quote=False)
        raise UnsupportedError(
            f"torch {torch.__version__} cannot use a GPU ({why}); install a driver and a torch that fit "
            "(docs/guide/gpu.md), or give --device cpu for a dry run"
        ) from None


if __name__ == "__main__":
    run_command(main)

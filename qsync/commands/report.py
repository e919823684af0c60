"""`qsync report`: a page about a plan that one can click through. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.commands.options import Force, Json, LoggedSteps, print_json, print_lines
from qsync.errors import QSyncError
from qsync.records.json_files import read_json

_ACCURACY = "figures.json"  # of python -m qsync.experiments.accuracy


def report(
    folder: Annotated[Path, typer.Argument(help="A folder with a plan.json and what it was made from.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes.", show_default="FOLDER/report.html")
    ] = None,
    measured: LoggedSteps = None,
    accuracy: Annotated[
        Path | None, typer.Option(help="Folder of python -m qsync.experiments.accuracy: its loss curves.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page: precisions and why, the step, the trade, memory, and what was measured."""
    from qsync.commands.loading import load_plan
    from qsync.commands.why_slow import measured_beside_predicted
    from qsync.figures import page

    if not (folder / "plan.json").is_file():
        raise QSyncError(f"{folder} has no plan.json; give a folder that qsync demo or qsync.hybrid wrote")
    page.check_available()
    plan, basis = load_plan(folder / "plan.json", None, None, force=force)
    parts = (basis.graph, plan, basis.profiles, basis.sensitivity, basis.cluster)
    demo = read_json(folder / "report.json") if (folder / "report.json").is_file() else {}
    found = page.Measured.of_demo(demo)
    if measured is not None:
        found = replace(found, ranks=measured_beside_predicted(parts, measured)["ranks"])
    if accuracy is not None:
        found = replace(found, losses={**found.losses, **_accuracy(accuracy)})
    written = page.write(out or folder / "report.html", plan, basis, found)
    if as_json:
        print_json({"written": str(written)})
        return
    print_lines(f"written: {written}")


def _accuracy(folder: Path) -> dict[str, Any]:
    """Return the held-out losses of every task's methods against seconds, means over seeds."""
    content = read_json(folder / _ACCURACY)
    if content.get("experiment") != "accuracy":
        raise QSyncError(f"{folder / _ACCURACY} is not of qsync.experiments.accuracy; give its --out")
    return {
        f"Held-out loss: {name}": ("seconds (simulated)", task["curves"])
        for name, task in content["tasks"].items() if task.get("curves")
    }  # fmt: skip

"""`qsync report`: write an interactive HTML page about a plan. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.commands.options import BasisFolder, ClusterFile, Force, Json, LoggedSteps, print_json, print_lines
from qsync.errors import QSyncError
from qsync.records.graph import digest
from qsync.records.json_files import read_json

_FIGURES = "figures.json"  # written by qsync demo, and by python -m qsync.experiments.accuracy


def report(
    folder: Annotated[Path, typer.Argument(help="A folder with a plan.json and what it was made from.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes (.html).", show_default="FOLDER/report.html")
    ] = None,
    basis: BasisFolder = None,
    cluster: ClusterFile = None,
    measured: LoggedSteps = None,
    accuracy: Annotated[
        Path | None, typer.Option(help="Folder of python -m qsync.experiments.accuracy: its loss curves.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page: precisions and reasons, the step, the trade-off, memory, measurements."""
    from qsync.commands.loading import load_plan, measured_beside_predicted
    from qsync.figures import page

    if not (folder / "plan.json").is_file():
        raise QSyncError(f"{folder} has no plan.json; give an output folder of qsync demo or qsync.hybrid")
    if out is not None:
        page.check_path(out, "--out")
    page.check_available()
    plan, at = load_plan(folder / "plan.json", basis, cluster, force=force)
    demo = read_json(folder / _FIGURES) if (folder / _FIGURES).is_file() else {}
    if demo.get("plan") not in (None, digest(plan.to_json())):
        print_lines(f"{folder / _FIGURES} is of another plan than plan.json, and is left out")
        demo = {}
    found = page.Measured.of_demo(demo)
    if measured is not None:
        found = replace(found, ranks=measured_beside_predicted(plan, at, measured)["ranks"])
    if accuracy is not None:
        found = replace(found, losses={**found.losses, **_accuracy(accuracy)})
    written = page.write(out or folder / "report.html", plan, at, found)
    if as_json:
        print_json({"written": str(written)})
        return
    print_lines(f"written: {written}")


def _accuracy(folder: Path) -> dict[str, Any]:
    """Return held-out losses over seconds, by task and method, averaged over seeds."""
    file = folder / _FIGURES
    content = read_json(file)
    if content.get("experiment") != "accuracy":
        raise QSyncError(f"{file} is not an output of qsync.experiments.accuracy; give its --out folder")
    try:
        return {
            f"Held-out loss: {name}": ("seconds (simulated)", {
                of: [(float(x), float(y)) for x, y in points] for of, points in task["curves"].items()
            })
            for name, task in content["tasks"].items() if task.get("curves")
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QSyncError(
            f"{file} has no loss curves by task ({type(error).__name__}); give the --out folder of "
            "qsync.experiments.accuracy"
        ) from error

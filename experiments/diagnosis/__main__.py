"""Plant faults in real jobs and judge qsync's diagnoses; count false alarms of a clean job.

    python -m qsync.experiments.diagnosis --out FOLDER --clean-minutes 30

Every fault is a separate job and piece. Clean minutes add up over pieces, so an interrupted run continues.
`--publish` writes the table into `docs/results/diagnosis.md`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qsync.errors import QSyncError
from qsync.experiments.diagnosis import runs
from qsync.experiments.diagnosis.faults import FAULTS
from qsync.experiments.harness import Experiment, Page, bar, run_command, table_of, yes
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.replayer.explanation.phases import TOLERANCE

_PAGE = Path("docs/results/diagnosis.md")
_PIECE_MINUTES = 5.0


def main(
    out: Out = Path("diagnosis"),
    only: Annotated[list[str] | None, typer.Option(help="Only this fault; repeat for several.")] = None,
    clean_minutes: Annotated[float, typer.Option(min=0.0, help="Of a job without a fault.")] = 0.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size: to try the command.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Plant faults in a job of two ranks, and judge qsync's diagnoses; an interrupted run continues."""
    for name in only or ():
        if name not in FAULTS:
            raise QSyncError(f"unknown fault {name!r}; choose from {', '.join(FAULTS)}")
    experiment = Experiment("diagnosis", out, settings={"tiny": tiny}, fresh=fresh)
    work = out.absolute() / "work"
    with experiment.progress():
        planted = {
            name: experiment.piece(f"fault {name}", partial(runs.judged, work, name, tiny=tiny))
            for name in FAULTS
            if name in (only or FAULTS)
        }
        clean = _clean(experiment, work, clean_minutes, tiny)
    minutes = sum(one["seconds"] for one in clean) / 60.0
    compared = [comparison for one in clean for comparison in one["comparisons"]]
    disturbed = [one for one in compared if one["others"] >= TOLERANCE]
    alarms, early = runs.alarms(compared), [alarm for one in planted.values() for alarm in one["early"]]
    bars = [bar("faults named", sum(one["named"] for one in planted.values()), len(planted), at_least=True)]
    if clean:
        bars.append(bar(f"false alarms in {minutes:.3g} clean minutes", len(alarms), 0))
    bars.append(bar("false alarms before a fault began", len(early), 0))
    alarmed = sum(bool(one["drift"]) for one in disturbed)
    longest_s = max((one["slow_s"] for one in compared), default=0.0)
    slower = [one["slowdown"] for one in compared if one["slowdown"] > 1.0 + TOLERANCE]
    note = (
        f"Two ranks of one thread, gloo. In {len(disturbed)} of {len(compared)} comparisons of the clean job "
        f"other processes took a tenth of a core or more; {alarmed} of these alarmed. The longest stretch in "
        f"which the clean job was slow lasted {longest_s:.0f} s. In {len(slower)} comparisons the machine "
        "itself was more than a tenth slower than when it was profiled, "
        f"{max(slower, default=1.0):.2f} times at most."
    )
    experiment.finish(
        {"faults": planted, "clean": clean, "clean_minutes": minutes, "comparisons": len(compared),
         "disturbed": len(disturbed), "alarms": [*alarms, *early]},
        bars=bars, tables=[_faults_table(planted)], page=Page(_PAGE, note=note) if publish else None,
    )  # fmt: skip


def _clean(experiment: Experiment, work: Path, minutes: float, tiny: bool) -> list[dict[str, Any]]:
    """Return pieces of a clean job for these minutes in total, counting those in the folder."""
    found: list[dict[str, Any]] = []
    while (left := minutes - sum(one["seconds"] for one in found) / 60.0) > 0.0:
        seconds = 60.0 * min(left, _PIECE_MINUTES)
        piece = experiment.piece(f"clean {len(found)}", partial(runs.clean, work, seconds, tiny=tiny))
        found.append(piece)
    return found


def _faults_table(planted: dict[str, Any]) -> Table:
    rows = [
        [FAULTS[name].what, FAULTS[name].expected.replace("|", " or "), yes(one["named"])]
        for name, one in planted.items()
    ]
    return table_of("Faults", ("planted", "to be named", "named"), rows, left=2)


if __name__ == "__main__":
    run_command(main)

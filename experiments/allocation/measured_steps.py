"""Are qsync's own plans as fast as they say? `python -m qsync.experiments.allocation.measured_steps`.

Two unequal ranks of this machine (the second emulated at half of its core) are profiled together, planned
for, and then run the plans in turns with each other and with the profile's own steps, as `qsync validate`
runs random ones. *planned* is what the plan said, from the profile before; *predicted* is the same plan
replayed from the profile that took turns with it, at the pace of the machine meanwhile. Measured steps are
medians of turns. Sensitivities are those that `python -m qsync.experiments.allocation.compare_methods` left in FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import qsync
from qsync.allocator import allocate, uniform
from qsync.backend.device_detection import machine
from qsync.errors import QSyncError
from qsync.experiments.allocation.compare_methods import OUT
from qsync.experiments.demo.rank import commit
from qsync.experiments.demo.runs import MARGIN
from qsync.experiments.prediction.validation_ranks import BUCKET_CAP_MB, run_validation
from qsync.experiments.workloads.subjects import NAMES
from qsync.records.basis import Basis
from qsync.records.json_files import read_json, write_json
from qsync.records.plans import Plan
from qsync.records.profiles import Sensitivity
from qsync.replayer.comparison import Validation

FULL, FASTEST, HALFWAY = "FP32", "least step", "half way to FP32"
WITH_MARGIN = f"least step, margin {MARGIN:.0%}"
# By so much a plan may be slower than predicted.
BAR = 0.03
SLACK = 0.02
TURNS_BEFORE = 2


def main(
    folder: Annotated[
        Path, typer.Argument(help="Where experiments.allocation left its sensitivities.")
    ] = OUT,
    model: Annotated[list[str] | None, typer.Option(help="Only these models.")] = None,
    turns: int = 5,
    seed: int = 0,
    again: Annotated[bool, typer.Option(help="Print what lies in the folder; run nothing.")] = False,
) -> None:
    """Profile, plan and run, model by model; print a table, write allocation_measured.json."""
    rows: list[dict[str, Any]] = []
    for name in model or NAMES:
        place = folder / name / "ranks"
        if not again:
            run(name, folder / name / "sensitivity.json", place, turns, seed)
        if (place / "plans.json").is_file():
            rows += judge(name, place)
    content = {
        "measured": "steps: medians of turns, at the pace of the profile's median round; planned and "
        "predicted steps are simulated; the second rank is emulated (half of its core)",
        "machine": machine(), "qsync": qsync.__version__, "commit": commit(), "seed": seed, "rows": rows,
    }  # fmt: skip
    write_json(folder / "allocation_measured.json", content)
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))


def run(name: str, sensitivity: Path, place: Path, turns: int, seed: int) -> None:
    """Profile the ranks of one model, plan for them, run the plans; all is kept in `place`."""
    if not sensitivity.is_file():
        raise QSyncError(
            f"there is no {sensitivity}; run python -m qsync.experiments.allocation.compare_methods first"
        )
    before = place / "before"
    run_validation(name, num_plans=1, turns=TURNS_BEFORE, seed=seed, out=before)
    # The sensitivity that validate leaves is empty: it chooses nothing.
    Sensitivity.load(sensitivity).save(before / "sensitivity.json")
    chosen = plans(Basis.load(before))
    run_validation(name, turns=turns, seed=seed, out=place, plans=chosen)
    write_json(place / "plans.json", {key: plan.to_json() for key, plan in chosen.items()})


def plans(basis: Basis, bucket_cap_bytes: int = int(BUCKET_CAP_MB * 2**20)) -> dict[str, Plan]:
    """What is run: nothing lowered, and the exact solver's plans for the least step and a longer one."""
    at = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
    full = uniform(
        basis.graph, basis.profiles, basis.cluster, {}, sensitivity=basis.sensitivity,
        bucket_cap_bytes=bucket_cap_bytes,
    )  # fmt: skip
    fastest = allocate(*at, slack=SLACK, bucket_cap_bytes=bucket_cap_bytes)
    assert full.step_s is not None and fastest.target_s is not None
    halfway = max(fastest.target_s, (fastest.target_s + full.step_s) / 2)
    return {
        FULL: full,
        FASTEST: fastest,
        WITH_MARGIN: allocate(*at, slack=SLACK, margin=MARGIN, bucket_cap_bytes=bucket_cap_bytes),
        HALFWAY: allocate(*at, target_s=halfway, bucket_cap_bytes=bucket_cap_bytes),
    }


def judge(name: str, place: Path) -> list[dict[str, Any]]:
    """A row per plan: planned, predicted and measured step, and by what part the last is longer than each."""
    chosen = {key: Plan.from_json(plan) for key, plan in read_json(place / "plans.json").items()}
    rows = []
    for one in Validation.load(place / "validation.json").comparisons:
        plan = chosen[one.name]
        assert plan.step_s is not None
        rows.append({
            "model": name, "plan": one.name, "planned_s": plan.step_s, "predicted_s": one.predicted_s,
            "measured_s": one.measured_s, "over_predicted": one.measured_s / one.predicted_s - 1.0,
            "over_planned": one.measured_s / plan.step_s - 1.0, "added_variance": plan.added_variance,
            "lowered": {c: len(of.lowered) for c, of in plan.classes.items()},
        })  # fmt: skip
    return rows


def holds(row: Mapping[str, Any]) -> bool:
    """Whether the plan was no slower than predicted, to within the bar."""
    return bool(row["over_predicted"] <= BAR)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per model and plan."""
    shown = Table(title="qsync's plans on two unequal ranks (measured; one emulated)", box=box.SIMPLE_HEAD)
    for heading in (
        "model",
        "plan",
        "planned",
        "predicted",
        "measured",
        "over predicted",
        "over planned",
        "holds",
    ):
        shown.add_column(heading, justify="left" if heading in ("model", "plan") else "right")
    for row in rows:
        seconds = (f"{1e3 * row[key]:.1f} ms" for key in ("planned_s", "predicted_s", "measured_s"))
        over = (f"{row[key]:+.1%}" for key in ("over_predicted", "over_planned"))
        shown.add_row(row["model"], row["plan"], *seconds, *over, "yes" if holds(row) else "NO")
    return shown


if __name__ == "__main__":
    typer.run(main)

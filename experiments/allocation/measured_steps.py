"""Are qsync's own plans as fast as predicted?

    python -m qsync.experiments.allocation.measured_steps --out FOLDER

Two unequal ranks of this machine (the second emulated at half of its core) are profiled together, planned
for, and then run the plans in turns with each other and with the profile's own steps, as `qsync validate`
runs random ones. *planned* is the plan's own prediction, from the profile before; *predicted* is the same
plan replayed from the profile that took turns with it, at the pace of the machine meanwhile. Measured steps
are medians of turns. Sensitivities are those that compare_methods left in FOLDER.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync.allocator import allocate, uniform
from qsync.errors import QSyncError
from qsync.experiments.allocation.compare_methods import OUT
from qsync.experiments.harness.experiment import Again, Experiment, Fresh, Models, Out, bar
from qsync.experiments.harness.experiment import run as run_command
from qsync.experiments.harness.ranks import BUCKET_CAP_BYTES, MARGIN
from qsync.experiments.harness.tables import table as table_of
from qsync.experiments.harness.tables import yes
from qsync.experiments.prediction.validation_ranks import run_validation
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
    out: Out = OUT,
    model: Models = None,
    turns: int = 5,
    seed: int = 0,
    again: Again = False,
    fresh: Fresh = False,
) -> None:
    """Profile, plan and run, model by model; print a table, write the figures to FOLDER/measured."""
    experiment = Experiment(
        "allocation, measured",
        out / "measured",
        seed=seed,
        settings={"turns": turns},
        fresh=fresh,
        again=again,
    )
    rows = []
    for name in model or NAMES:
        place = out / name / "ranks"
        measure = partial(run, name, out / name / "sensitivity.json", place, turns, seed)
        rows += experiment.piece(name, measure)
    experiment.finish(
        {"rows": rows}, bars=[_bar(row) for row in rows], tables=[table(rows)],
        measured="steps: medians of turns, at the pace of the profile's median round; planned and "
        "predicted steps are simulated; the second rank is emulated (half of its core)",
    )  # fmt: skip


def run(name: str, sensitivity: Path, place: Path, turns: int, seed: int) -> list[dict[str, Any]]:
    """Profile the ranks of one model, plan for them, run the plans; keep all in `place`, return its rows."""
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
    return judge(name, place)


def plans(basis: Basis, bucket_cap_bytes: int = BUCKET_CAP_BYTES) -> dict[str, Plan]:
    """Return the plans: nothing lowered, and the exact solver's for the least step and a longer one."""
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
    """Return a row per plan: planned, predicted and measured step, and how much longer the last is."""
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


def _bar(row: Mapping[str, Any]) -> dict[str, Any]:
    return bar(f"{row['model']}, {row['plan']}: measured over predicted", row["over_predicted"], BAR)


def holds(row: Mapping[str, Any]) -> bool:
    """Return whether the plan was no slower than predicted, to within the bar."""
    return bool(_bar(row)["holds"])


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line per model and plan."""
    steps, over = ("planned", "predicted", "measured"), ("predicted", "planned")
    cells = [
        [
            row["model"], row["plan"], *(f"{1e3 * row[f'{key}_s']:.1f} ms" for key in steps),
            *(f"{row[f'over_{key}']:+.1%}" for key in over), yes(holds(row)),
        ]
        for row in rows
    ]  # fmt: skip
    headings = ("model", "plan", *steps, *(f"over {key}" for key in over), "holds")
    return table_of("qsync's plans on two unequal ranks (measured; one emulated)", headings, cells, left=2)


if __name__ == "__main__":
    run_command(main)

"""How far replay's step times are from real ones, over random plans, beside simpler predictions.

    python -m qsync.experiments.prediction.replay_error --out FOLDER

Thirty random plans each of five models, on one rank and on two unequal ranks. Every plan is replayed from the
profile that took turns with its steps; *no casts* is replay from the same profile with every cast free.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync import Cluster, OpGraph, Precision, Profile
from qsync.experiments.harness import Experiment, Page, bar, run_command, table_of
from qsync.experiments.harness.emulated_profiles import without_casts
from qsync.experiments.harness.options import Fresh, Models, Out, Publish
from qsync.experiments.harness.ranks import BUCKET_CAP_BYTES
from qsync.experiments.prediction.random_plans import PlanRun, run_model
from qsync.experiments.workloads.subjects import NAMES
from qsync.records.json_files import read_json
from qsync.replayer import replay
from qsync.replayer.step_noise import percentile

# By number of ranks, the limits of the median and of the 95th percentile of |error|.
BARS = {1: (0.02, 0.05), 2: (0.03, 0.06)}
METHODS = ("replay", "no casts")
_PLANS, _TURNS, _SEED = 30, 3, 0
_PAGE = Page(Path("docs/results/prediction.md"), note="One thread a rank.", marker="steps")
MEASURED = "steps: medians of turns, at the pace of the profile's median round"


def main(
    out: Out = Path("replay_error"), model: Models = None, publish: Publish = False, fresh: Fresh = False
) -> None:
    """Run, print the table and write figures.json and .md to the folder."""
    settings = {"plans": _PLANS, "turns": _TURNS}
    experiment = Experiment("replay error", out, seed=_SEED, settings=settings, fresh=fresh)

    def measure(name: str, num_ranks: int) -> dict[str, Any]:
        folder = out / f"{name}-{num_ranks}"
        runs = run_model(
            name, num_ranks, _PLANS, turns=_TURNS, seed=_SEED, weak_share=0.5, out=folder
        )  # fmt: skip
        return judge(name, num_ranks, folder, runs)

    chosen = itertools.product(model or NAMES, BARS)
    results = [experiment.piece(f"{name}-{num}", partial(measure, name, num)) for name, num in chosen]
    experiment.finish(
        {"results": results}, measured=MEASURED, bars=[one for entry in results for one in bars(entry)],
        tables=[table(results)], page=_PAGE if publish else None,
    )  # fmt: skip


def judge(name: str, num_ranks: int, folder: Path, runs: Sequence[PlanRun]) -> dict[str, Any]:
    """Return the errors of every method on one model's runs, as parts of the measured step.

    `folder` holds the basis that was measured between them.
    """
    graph = OpGraph.load(folder / "graph.json")
    cluster = Cluster.from_json(read_json(folder / "cluster.json"))
    profiles = {c.name: Profile.load(folder / f"profile-{c.name}.json") for c in cluster.classes}
    predicted = [(one.measured_s, predictions(graph, cluster, profiles, one)) for one in runs]
    return {
        "model": name, "ranks": num_ranks,
        "predicted_s": [one.predicted_s for one in runs], "measured_s": [one.measured_s for one in runs],
        "errors": {method: [p[method] / step_s - 1.0 for step_s, p in predicted] for method in METHODS},
        "inside_interval": sum(one.is_inside for one in runs) / len(runs),
    }  # fmt: skip


def predictions(
    graph: OpGraph, cluster: Cluster, profiles: Mapping[str, Profile], run: PlanRun
) -> dict[str, float]:
    """Return the seconds that each method predicts for a run."""
    plan = {c: {op: Precision(p) for op, p in of.items()} for c, of in run.assignments.items()}
    free = {c: without_casts(profile) for c, profile in profiles.items()}
    steps = (replay(graph, plan, of, cluster, bucket_cap_bytes=BUCKET_CAP_BYTES) for of in (profiles, free))
    return dict(zip(METHODS, (timeline.step_s for timeline in steps), strict=True))


def median_and_95th(errors: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile of |error|."""
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes), percentile(sizes, 0.95)


def bars(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return replay's errors of one model and number of ranks beside their limits."""
    found = zip(("median", "95th percentile"), median_and_95th(entry["errors"]["replay"]), strict=True)
    return [
        bar(f"{entry['model']}, {entry['ranks']} ranks, {what}", error, limit)
        for (what, error), limit in zip(found, BARS[entry["ranks"]], strict=True)
    ]


def table(results: list[dict[str, Any]]) -> Table:
    """Return the median and 95th percentile of |error| of every method, by model and number of ranks."""
    rows = []
    for entry in results:
        found = (median_and_95th(entry["errors"][method]) for method in METHODS)
        errors = [f"{median:.1%} / {high:.1%}" for median, high in found]
        rows.append([entry["model"], str(entry["ranks"]), *errors, f"{entry['inside_interval']:.0%}"])
    headings = ("model", "ranks", *METHODS, "inside interval")
    return table_of("|error| of the step, median / 95th percentile (measured)", headings, rows)


if __name__ == "__main__":
    run_command(main)

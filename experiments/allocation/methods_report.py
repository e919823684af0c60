"""The report of compare_methods.py: each method's variance against the exact solver's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from qsync.experiments.allocation.methods import ADDITIVE, BATCHES, GREEDY, MILP
from qsync.experiments.harness.experiment import bar
from qsync.experiments.harness.tables import markdown_table, table

Rows = Sequence[Mapping[str, Any]]

BEST_UNIFORM = "best uniform"
GREEDY_BAR = 0.05  # by which greedy may add more than the exact solver
# Differences below this part are rounding, or within the exact solver's own gap of a thousandth.
RELATIVE = 1e-3


def summary(rows: Rows) -> dict[str, Any]:
    """Return each method's factor on the MILP's variance and targets met, by kind of cluster and model.

    A factor is a geometric mean over the targets that the method met and at which something must be lowered.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], {}).setdefault(row["model"], [])
    for kind, models in kinds.items():
        for model in models:
            models[model] = _of([row for row in rows if (row["kind"], row["model"]) == (kind, model)])
    return {"clusters": kinds, "verdicts": _verdicts(rows)}


def _of(rows: Rows) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for at in _problems(rows).values():
        exact = at[MILP]["added_variance"]
        if not exact > 0.0:
            continue
        for method, row in {**at, BEST_UNIFORM: _best_uniform(at)}.items():
            entry = found.setdefault(method, {"logs": [], "problems": 0, "worst": None, "over": 0.0})
            entry["problems"] += 1
            if row is None:
                continue
            if row["reaches"] and row["added_variance"] > 0.0:
                entry["logs"].append(math.log(row["added_variance"] / exact))
            elif row["reaches"]:
                entry["logs"].append(-math.inf)
            if row["step_s"] is not None:
                entry["over"] = max(entry["over"], row["step_s"] / row["target_s"] - 1.0)
    for entry in found.values():
        logs = entry.pop("logs")
        entry["met"] = len(logs)
        entry["factor"] = math.exp(sum(logs) / len(logs)) if logs else None
        entry["worst"] = math.exp(max(logs)) if logs else None
    return found


def _problems(rows: Rows) -> dict[tuple[str, str, float], dict[str, Mapping[str, Any]]]:
    """Return rows by method, for each model, cluster and target."""
    found: dict[tuple[str, str, float], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["cluster"], row["part"]), {})[row["method"]] = row
    return found


def _best_uniform(at: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    met = [row for method, row in at.items() if method.startswith("uniform ") and row["reaches"]]
    return min(met, key=lambda row: row["added_variance"], default=None)


def _verdicts(rows: Rows) -> dict[str, Any]:
    """Return the worst cases over all problems, and every problem in which another method adds less."""
    problems = _problems(rows)
    own = (MILP, GREEDY, BATCHES)
    beaten, greedy = [], []
    for key, at in problems.items():
        exact = at[MILP]["added_variance"]
        for method, row in at.items():
            if method not in own and row["reaches"] and row["added_variance"] < exact * (1 - RELATIVE):
                beaten.append([*key, method, row["added_variance"] / exact])
        if exact > 0.0:
            greedy.append((at[GREEDY]["added_variance"] / exact - 1.0, *key))
    exacts, additive = ([at[method] for at in problems.values()] for method in (MILP, ADDITIVE))
    return {
        "problems": len(problems),
        "violations": sum(len(at[m]["violations"]) for at in problems.values() for m in (MILP, GREEDY)),
        "baselines_that_add_less": beaten,
        "greedy_worst": list(max(greedy, default=(0.0,))),
        "greedy_beyond_bar": [list(entry) for entry in greedy if entry[0] > GREEDY_BAR],
        "milp_worst_gap": max((row["gap"] for row in exacts), default=0.0),
        "milp_gaps_beyond_one_per_cent": sum(row["gap"] > 0.01 for row in exacts),
        "milp_worst_seconds": max((row["seconds"] for row in exacts), default=0.0),
        "greedy_worst_seconds": max((at[GREEDY]["seconds"] for at in problems.values()), default=0.0),
        "dynamic_batching_met": sum(at[BATCHES]["reaches"] for at in problems.values()),
        "additive_misses_by": max(
            ((row["step_s"] or 0.0) / row["target_s"] - 1.0 for row in additive), default=0.0
        ),
    }  # fmt: skip


def cell(entry: Mapping[str, Any] | None) -> str:
    """Return the factor, and how many of the targets were met if not all."""
    if entry is None:
        return "-"
    if not entry["met"]:
        return "never met"
    factor = entry["factor"]
    text = f"{factor:.3g}" if factor >= 10 else f"{factor:.2f}"
    return text if entry["met"] == entry["problems"] else f"{text} ({entry['met']} of {entry['problems']})"


def bars(verdicts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the worst cases over all problems beside their limits."""
    return [
        bar("violations of plans", verdicts["violations"], 0),
        bar("baselines that add less variance", len(verdicts["baselines_that_add_less"]), 0),
        bar("greedy above MILP, worst", verdicts["greedy_worst"][0], GREEDY_BAR),
    ]


def _rows(models: Mapping[str, Any]) -> list[list[str]]:
    methods = dict.fromkeys(method for entry in models.values() for method in entry)
    return [
        [method, *(cell(entry.get(method)) for entry in models.values())]
        for method in methods
        if not method.startswith("uniform ")
    ]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Return one table per kind of cluster, and the verdicts."""
    title = "Added variance at equal step time, times the MILP's (simulated; {})"
    verdicts = [
        [name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)]
        for name, value in found["verdicts"].items()
    ]
    return [
        *(
            table(title.format(kind), ["", *models], _rows(models))
            for kind, models in found["clusters"].items()
        ),
        table("Over all problems", ("", ""), verdicts, left=2),
    ]


def markdown(content: Mapping[str, Any]) -> str:
    """Return the tables as they stand in docs/results/allocation.md."""
    lines = [
        f"Variance added at equal step time, times that of the exact solver's plan: geometric means over "
        f"{len(content['parts'])} targets between",
        "the least step and FP32's; in brackets how many of the targets a method met at all. Steps and "
        "variances simulated; profiles",
        f"measured on one thread of an {content['machine']['processor']}, "
        f"torch {content['machine']['torch']}, seed {content['seed']}, commit {content['commit']}.",
    ]
    for kind, models in content["summary"]["clusters"].items():
        lines += ["", *markdown_table([kind, *models], _rows(models))]
    return "\n".join(lines) + "\n"

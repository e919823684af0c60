"""Tables of compare_methods.py: each method's variance relative to the exact solver's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from qsync.experiments.allocation.methods import MILP, NO_CASTS
from qsync.experiments.harness import bar, grouped, table_of

Rows = Sequence[Mapping[str, Any]]

BEST_UNIFORM = "best uniform"
# Smaller relative differences are rounding, or within the exact solver's own gap of a thousandth.
RELATIVE = 1e-3


def summary(rows: Rows) -> dict[str, Any]:
    """Return each method's variance relative to qsync's, and its met targets, by cluster and model.

    A factor is a geometric mean over the targets that the method met and that require lowering.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for (kind, model), own in grouped(rows, "kind", "model").items():
        kinds.setdefault(kind, {})[model] = _of(own)
    return {"clusters": kinds, "verdicts": _verdicts(rows)}


def _of(rows: Rows) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for at in _problems(rows).values():
        exact = at[MILP]["added_variance"]
        if not exact > 0.0:
            continue
        uniform = [row for method, row in at.items() if method.startswith("uniform ") and row["reaches"]]
        best = min(uniform, key=lambda row: row["added_variance"], default=None)
        for method, row in {**at, BEST_UNIFORM: best}.items():
            entry = found.setdefault(method, {"logs": [], "problems": 0})
            entry["problems"] += 1
            if row is not None and row["reaches"]:
                added = row["added_variance"] / exact
                entry["logs"].append(math.log(added))
    for entry in found.values():
        logs = entry.pop("logs")
        entry["met"] = len(logs)
        entry["factor"] = math.exp(sum(logs) / len(logs)) if logs else None
    return found


def _problems(rows: Rows) -> dict[tuple[str, str, float], dict[str, Mapping[str, Any]]]:
    """Group rows by model, cluster and target, then by method."""
    problems = grouped(rows, "model", "cluster", "part")
    return {at: {row["method"]: row for row in own} for at, own in problems.items()}


def _verdicts(rows: Rows) -> dict[str, Any]:
    """Return the worst cases of all problems, and every problem in which another method adds less."""
    problems = _problems(rows)
    beaten = []
    for key, at in problems.items():
        exact = at[MILP]["added_variance"]
        for method, row in at.items():
            less = row["reaches"] and row["added_variance"] < exact * (1 - RELATIVE)
            if less and method != MILP:
                beaten.append([*key, method, row["added_variance"] / exact])
    exacts, free = ([at[name] for at in problems.values()] for name in (MILP, NO_CASTS))
    return {
        "problems": len(problems),
        "violations": sum(len(row["violations"]) for row in exacts),
        "baselines_that_add_less": beaten,
        "milp_worst_gap": max((row["gap"] for row in exacts), default=0.0),
        "milp_worst_seconds": max((row["seconds"] for row in exacts), default=0.0),
        "casts_left_out_misses_by": max((row["step_s"] / row["target_s"] - 1.0 for row in free), default=0.0),
    }


def cell(entry: Mapping[str, Any] | None) -> str:
    """Format a factor, with the number of met targets if not all."""
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
    ]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Return one table per kind of cluster."""
    shown = []
    for kind, models in found["clusters"].items():
        methods = dict.fromkeys(m for of in models.values() for m in of if not m.startswith("uniform "))
        rows = [[method, *(cell(of.get(method)) for of in models.values())] for method in methods]
        title = f"Added variance at equal step time, times qsync's (simulated; {kind})"
        shown.append(table_of(title, ["", *models], rows))
    return shown

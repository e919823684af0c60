"""The tables and the picture of compare_methods.py: each method's variance against the exact solver's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from qsync.experiments.allocation.methods import (
    ADDITIVE,
    BATCHES,
    BY_TIME,
    BY_VARIANCE,
    GREEDY,
    MILP,
    REPAIRED,
)  # fmt: skip
from qsync.experiments.harness.experiment import bar
from qsync.experiments.harness.pictures import DASHED, legend_below, new_figure, open_axes
from qsync.experiments.harness.tables import table
from qsync.figures.style import FAINT, INK, save_png

Rows = Sequence[Mapping[str, Any]]

BEST_UNIFORM = "best uniform"
GREEDY_BAR = 0.05  # by which greedy may add more than the exact solver
# Differences below this part are rounding, or within the exact solver's own gap of a thousandth.
RELATIVE = 1e-3
# Okabe and Ito's, which colour-blind readers tell apart; (colour, marker, line).
_STYLES = {
    MILP: ("#0072b2", "o", "-"),
    GREEDY: (INK, "+", ""),
    "random, best": ("#009e73", "^", ":"),
    BY_VARIANCE: ("#e69f00", "s", "--"),
    BY_TIME: ("#d55e00", "v", "--"),
    REPAIRED: ("#cc79a7", "D", "-."),
    "uniform": (FAINT, "*", ""),
}


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


def draw(rows: Rows, path: str | Path) -> Path:
    """Draw a panel per model and cluster: the first cluster above, the one of most classes below."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    shown = list(dict.fromkeys([clusters[0], max(clusters, key=lambda name: name.count("+"))]))
    title = "What a shorter step costs, by method (simulated; profiles measured, GPUs from data sheets)"
    figure = new_figure(3.1 * len(models) + 0.6, 3.2 * len(shown) + 0.9, title)
    panels = figure.subplots(len(shown), len(models), squeeze=False)
    for cluster, line in zip(shown, panels, strict=True):
        for model, axes in zip(models, line, strict=True):
            _panel(axes, [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)])
            axes.set_title(f"{model}, {cluster}", fontsize=8, loc="left", color=INK)
        line[0].set_ylabel("added variance", color=INK)
    for axes in panels[-1]:
        axes.set_xlabel("step, ms", color=INK)
    legend_below(figure, panels.flat, ncols=8)
    return save_png(figure, path, dpi=130)


def _panel(axes: Axes, rows: Rows) -> None:
    for name, (colour, marker, line) in _STYLES.items():
        met = [row for row in rows if row["method"].startswith(name) and row["added_variance"]]
        if name != "uniform":
            met = [row for row in met if row["reaches"]]
        points = sorted({(1e3 * row["step_s"], row["added_variance"]) for row in met})
        if points:
            axes.plot(
                *zip(*points, strict=True), marker=marker, linestyle=line or "none", color=colour,
                markersize=8 if name == MILP else 4, fillstyle="none" if name == MILP else "full",
                linewidth=1, label=name, zorder=3 if name == GREEDY else 2,
            )  # fmt: skip
    for row in rows:
        if row["method"] == BATCHES:
            axes.axvline(1e3 * row["step_s"], **DASHED, label=f"{BATCHES}: adds none")
            break
    axes.set_yscale("log")
    open_axes(axes)

"""The picture of compare_methods.py: variance against step time, every method on every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from qsync.experiments.allocation.methods import BATCHES, BY_TIME, BY_VARIANCE, GREEDY, MILP, REPAIRED
from qsync.experiments.harness.pictures import DASHED, legend_below, new_figure, open_axes
from qsync.figures.style import FAINT, INK, save_png

Rows = Sequence[Mapping[str, Any]]

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

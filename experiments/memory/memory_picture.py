"""Draw predicted against measured bytes: the picture of experiments/memory/memory_error.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qsync.experiments.harness.pictures import new_figure
from qsync.figures.memory import stack_parts, strip_axes
from qsync.figures.style import FAINT, INK, SERIES_COLOURS, save_png


def draw(rows: Sequence[Mapping[str, Any]], curve: Mapping[str, Sequence[int]], path: str | Path) -> Path:
    """Draw the rows of memory_error.json, and the curve of one plan (`StepMemory.curve`)."""
    rows = [row for row in rows if "peak_bytes" in row]  # refused plans have nothing to show
    figure = new_figure(12, 7.6, "Bytes predicted from the graph, and measured")
    (saved, peak), (budget, step) = figure.subplots(2, 2)
    _against(saved, rows, "saved", 0.01)
    _against(peak, rows, "peak", 0.05)
    _within(budget, rows)
    saved.legend(*_keys(rows, "model"), frameon=False, fontsize=8, ncols=3, loc="lower center")
    peak.legend(*_keys(rows, "part"), frameon=False, fontsize=8, ncols=2, loc="lower center")
    stack_parts(step, curve)
    handles, labels = step.get_legend_handles_labels()
    step.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, ncols=2, loc="upper left")
    step.set_xlabel("operator: forward | backward (a plan of GPT, simulated)")
    return save_png(figure, path)


def _against(axes: Axes, rows: Sequence[Mapping[str, Any]], what: str, bar: float) -> None:
    """Draw predicted over measured, one point for each plan; the bar is the grey band."""
    axes.axhspan(1 - bar, 1 + bar, color="#f0f1f3", zorder=0)
    axes.axhline(1, color=FAINT, linewidth=0.8)
    _points(axes, rows, f"{what}_bytes", lambda row: row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"])
    reach = max(abs(row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"] - 1) for row in rows)
    axes.set_ylim(1 - 1.4 * max(bar, reach), 1 + 1.4 * max(bar, reach))
    axes.set_xlabel(f"{'saved for backward' if what == 'saved' else 'peak'}, measured MB")
    axes.set_ylabel("predicted / measured")
    strip_axes(axes)


def _within(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw what each plan takes of its budget; none may take more than all of it."""
    axes.axhline(1, color=INK, linewidth=1)
    _points(axes, rows, "budget_bytes", lambda row: row["peak_bytes"] / row["budget_bytes"])
    axes.set_xlabel("budget, MB")
    axes.set_ylabel("peak, measured / budget")
    strip_axes(axes)


def _points(
    axes: Axes, rows: Sequence[Mapping[str, Any]], along: str, height: Callable[[Mapping[str, Any]], float]
) -> None:
    colours, markers = _styles(rows, "model"), _styles(rows, "part")
    for kind in dict.fromkeys((row["model"], row["part"]) for row in rows):
        own = [row for row in rows if (row["model"], row["part"]) == kind]
        axes.scatter(
            [row[along] / 1e6 for row in own], [height(row) for row in own], s=16,
            facecolor=colours[kind[0]], marker=markers[kind[1]], alpha=0.6, linewidths=0,
        )  # fmt: skip


def _styles(rows: Sequence[Mapping[str, Any]], what: str) -> dict[str, str]:
    """Return the colour of each model, or the marker of each part."""
    return dict(zip(dict.fromkeys(row[what] for row in rows), SERIES_COLOURS if what == "model" else "oDs^"))  # noqa: B905


def _keys(rows: Sequence[Mapping[str, Any]], what: str) -> tuple[list[Line2D], list[str]]:
    """Return handles and labels of a legend of colours (models) or of markers (parts)."""
    found = _styles(rows, what)
    pairs = [(style, "o") if what == "model" else (INK, style) for style in found.values()]
    handles = [Line2D([], [], linewidth=0, markersize=5, color=colour, marker=m) for colour, m in pairs]
    return handles, list(found)

"""Draw every run of the demo: its step time, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qsync import QSyncError
from qsync.experiments.harness.pictures import DASHED, legend_below, new_figure
from qsync.figures.style import INK, save_png, strip_axes

RUN_TITLES = {
    "fast_alone": "fast rank alone, FP32 (the limit)",
    "ddp_fp32": "DDP, FP32 everywhere",
    "weak_bf16": "weak rank all in 16 bits",
    "weak_int8": "weak rank all in INT8",
    "all_int8": "every rank in INT8",
    "qsync": "qsync plan",
}

# The bars of a run: (label, style).
_STEP_BARS: dict[str, tuple[str, dict[str, Any]]] = {
    "measured_step_s": ("measured", {"facecolor": "#0072b2", "edgecolor": "#0072b2"}),
    "predicted_step_s": (
        "predicted (simulated)",
        {"facecolor": "#ffffff", "edgecolor": "#0072b2", "hatch": "////"},
    ),
}


def predicted_vs_measured(
    runs: Mapping[str, Mapping[str, float | None]], path: str | Path, *, emulated: bool = False
) -> Path:
    """Draw the measured and predicted step of every run, with a line at the limit: the fast rank alone.

    `runs` is that of report.json: run -> measured_step_s and predicted_step_s (s), of which either may be
    missing. Raises QSyncError if there is no run.
    """
    if not runs:
        raise QSyncError("there is no run to draw; give the runs of a report")
    note = " (emulated device)" if emulated else ""
    figure = new_figure(9, 1.5 + 0.72 * len(runs), f"Step time, predicted and measured{note}")
    axes = figure.subplots()
    limit_s = runs.get("fast_alone", {}).get("measured_step_s")
    longest_s = max((_value(run, key) for run in runs.values() for key in _STEP_BARS), default=0.0) or 1.0
    for position, run in enumerate(runs.values()):
        _draw_run(axes, position, run, limit_s)
    axes.set_xlim(0, 1.24 * 1e3 * longest_s)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_yticks(range(len(runs)), [RUN_TITLES.get(name, name) for name in runs])
    axes.set_xlabel("step time, ms", color=INK)
    strip_axes(axes, grid="x")
    handles: list[Patch | Line2D] = [Patch(**style, label=label) for label, style in _STEP_BARS.values()]
    if limit_s:
        axes.axvline(1e3 * limit_s, **DASHED, zorder=3)
        handles.append(Line2D([], [], **DASHED, label="limit: fast rank alone"))
    legend_below(figure, handles, ncols=3)
    return save_png(figure, path)


def _draw_run(axes: Axes, position: int, run: Mapping[str, float | None], limit_s: float | None) -> None:
    measured_s, predicted_s = (_value(run, key) for key in _STEP_BARS)
    for offset, key in zip((-0.19, 0.19), _STEP_BARS, strict=True):
        style = {**_STEP_BARS[key][1], "linewidth": 1.0}
        axes.barh(position + offset, 1e3 * _value(run, key), height=0.32, **style)
    notes = []
    if measured_s:
        notes.append((-0.19, measured_s, f"{1e3 * measured_s:.0f} ms"))
        if limit_s:
            notes[-1] = (*notes[-1][:2], f"{notes[-1][2]}, {measured_s / limit_s:.2f} × limit")
    if predicted_s:
        error = f", {100 * (predicted_s / measured_s - 1):+.1f} %" if measured_s else ""
        notes.append((0.19, predicted_s, f"{1e3 * predicted_s:.0f} ms{error}"))
    for offset, value_s, text in notes:
        at = (1e3 * value_s, position + offset)
        plate = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}  # over the limit
        axes.annotate(
            text, at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK,
            bbox=plate,
        )  # fmt: skip


def _value(run: Mapping[str, float | None], key: str) -> float:
    return run.get(key) or 0.0

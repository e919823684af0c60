"""Draw every run of the demo: its step time, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qsync import QSyncError
from qsync.experiments.harness.pictures import DASHED, legend_below, new_figure
from qsync.figures.style import INK, save_png, strip_axes

RUN_TITLES = {
    "fast_alone": "fast rank alone, {base} (the limit)",
    "ddp": "DDP, {base} everywhere",
    "lb_bsp": "LB-BSP, {base}: samples by speed",
    "weak_bf16": "weak rank all in 16 bits",
    "weak_int8": "weak rank all in INT8",
    "weak_int8_all": "weak rank, all products in INT8",
    "all_int8": "every rank in INT8",
    "qsync": "qsync plan",
    "qsync_share": "qsync plan, shares too",
}


def run_title(name: str, base: str = "fp32") -> str:
    """Return what a run is called in tables and pictures."""
    return RUN_TITLES.get(name, name).format(base=base.upper())


# The bars of a run: (label, style).
_STEP_BARS: dict[str, tuple[str, dict[str, Any]]] = {
    "measured_step_s": ("measured", {"facecolor": "#0072b2", "edgecolor": "#0072b2"}),
    "predicted_step_s": (
        "predicted (simulated)",
        {"facecolor": "#ffffff", "edgecolor": "#0072b2", "hatch": "////"},
    ),
}


def predicted_vs_measured(
    runs: Mapping[str, Mapping[str, float | None]],
    path: str | Path,
    *,
    emulated: bool = False,
    base: str = "fp32",
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
    longest_s = max((run.get(key) or 0.0 for run in runs.values() for key in _STEP_BARS), default=0.0)
    for position, run in enumerate(runs.values()):
        for offset, (key, (_, style)) in zip((-0.19, 0.19), _STEP_BARS.items(), strict=True):
            if seconds := run.get(key):
                axes.barh(position + offset, 1e3 * seconds, height=0.32, linewidth=1.0, **style)
                text = f"{1e3 * seconds:.0f} ms{_compared(run, key, limit_s)}"
                axes.annotate(
                    text, (1e3 * seconds, position + offset),
                    xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK, zorder=4,
                    bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
                )  # fmt: skip
    axes.set_xlim(0, 1.24 * 1e3 * (longest_s or 1.0))
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_yticks(range(len(runs)), [run_title(name, base) for name in runs])
    axes.set_xlabel("step time, ms", color=INK)
    strip_axes(axes, grid="x")
    handles: list[Patch | Line2D] = [Patch(**style, label=label) for label, style in _STEP_BARS.values()]
    if limit_s:
        axes.axvline(1e3 * limit_s, **DASHED, zorder=3)
        handles.append(Line2D([], [], **DASHED, label="limit: fast rank alone"))
    legend_below(figure, handles, ncols=3)
    return save_png(figure, path)


def _compared(run: Mapping[str, float | None], key: str, limit_s: float | None) -> str:
    """Compare a measured step with the limit, a predicted one with the measured."""
    measured_s, predicted_s = (run.get(one) for one in _STEP_BARS)
    if key == "measured_step_s":
        return f", {measured_s / limit_s:.2f} × limit" if measured_s and limit_s else ""
    return f", {100 * (predicted_s / measured_s - 1):+.1f} %" if measured_s and predicted_s else ""

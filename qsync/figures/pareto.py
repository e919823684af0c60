"""Draw the trade-off between step time, added variance and memory, a point per plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from qsync.figures.style import FAINT, INK, SERIES_COLOURS, remove_frame, save_png
from qsync.records.plans import Plan, traded_classes
from qsync.records.profiles import shown


def draw(plans: Sequence[Plan], path: str | Path) -> Path:
    """Draw step time against added variance (simulated), above the operators lowered on each class.

    Points show their plan's number, counted from 1 like the files of `qsync plan --pareto`. Variance is
    logarithmic; a plan that adds none is hollow, on the lower edge. The dashed line is the proved lower bound
    of variance. Where plans trade memory, too, the peaks of their classes stand below, and points are the
    darker the more memory they take.

    >>> draw(frontier(graph, profiles, sensitivity, cluster), "frontier.png")
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    trade, lowered = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    steps = [1e3 * (plan.step_s or 0.0) for plan in plans]
    peaks = {
        name: [entry.memory_bytes / 2**20 for plan in plans if (entry := plan[name].predicted)]
        for name in traded_classes(plans)
    }
    _draw_trade(trade, plans, steps, list(peaks.values()))
    if peaks:
        _draw_peaks(lowered, peaks, steps)
    else:
        _draw_lowered(lowered, plans, steps)
    for axes in (trade, lowered):
        remove_frame(axes)
        axes.margins(x=0.06)
    figure.suptitle(
        f"{plans[0].model}: what a shorter step costs (simulated)", x=0.01, ha="left", fontsize=11, color=INK
    )
    return save_png(figure, path, dpi=120)


def _draw_trade(
    axes: Axes, plans: Sequence[Plan], steps: Sequence[float], peaks: Sequence[Sequence[float]]
) -> None:
    added = [plan.added_variance or 0.0 for plan in plans]
    positive = [value for value in added if value > 0.0]
    floor = min(positive) / 3 if positive else 1.0
    heights = [max(value, floor) for value in added]
    if not peaks:
        _draw_bounds(axes, plans, steps, heights, floor)
    held = [sum(own) for own in zip(*peaks, strict=True)] or [1.0] * len(plans)
    shades = [to_rgba("#0072b2", own / max(held)) for own in held]
    faces = [shade if value > 0.0 else to_rgba("white") for shade, value in zip(shades, added, strict=True)]
    axes.scatter(steps, heights, facecolor=faces, edgecolor="#0072b2", zorder=2)
    for number, (x, y, value) in enumerate(zip(steps, heights, added, strict=True), 1):
        text = f"{number}" if value > 0.0 else f"{number}: none"
        axes.annotate(text, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, color=INK)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_ylabel("added variance\n(squared gradient norm)", fontsize=9, color=INK)


def _draw_bounds(
    axes: Axes, plans: Sequence[Plan], steps: Sequence[float], heights: Sequence[float], floor: float
) -> None:
    """Draw the curve through the plans, and dashed the proved bound where that is below."""
    axes.step(steps, heights, where="post", color=FAINT, linewidth=1, zorder=1)
    bounds = [max(plan.bound, floor) if plan.bound is not None else float("nan") for plan in plans]
    if any(bound < 0.99 * height for bound, height in zip(bounds, heights, strict=True)):
        # A faster plan is not below a slower plan's bound, so a bound holds back to the previous point.
        axes.step(
            steps, bounds, where="pre", color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1,
            label="no plan is below",
        )  # fmt: skip
        axes.legend(frameon=False, fontsize=8, loc="upper right")


def _draw_peaks(axes: Axes, peaks: Mapping[str, Sequence[float]], steps: Sequence[float]) -> None:
    """Draw the peak of each class that trades memory."""
    for (name, own), colour in zip(peaks.items(), SERIES_COLOURS, strict=False):
        axes.scatter(steps, own, color=colour, s=14, label=name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("memory peak, MiB", fontsize=9, color=INK)
    axes.set_xlabel("step, ms", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_lowered(axes: Axes, plans: Sequence[Plan], steps: Sequence[float]) -> None:
    for number, (name, entry) in enumerate(plans[0].classes.items()):
        of_plans = [plan.classes[name] for plan in plans]
        shares = [100 * len(own.lowered) / max(1, len(own.assignment)) for own in of_plans]
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        label = shown(name, entry.origin)
        axes.plot(steps, shares, color=colour, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set_ylim(-4, 104)
    axes.set_ylabel("operators lowered, %", fontsize=9, color=INK)
    axes.set_xlabel("step, ms", fontsize=9, color=INK)
    # Beside the axes, because curves may run anywhere.
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

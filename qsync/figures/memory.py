"""Draw how a step fills each class's memory, by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsync.figures.style import INK, MEMORY_PARTS, remove_frame, save_png
from qsync.replayer import Peak


def steps(peaks: Mapping[str, Peak], path: str | Path) -> Path:
    """Draw each class's memory over a step (`qsync.replayer.memory_breakdown`), one below the other.

    The budget is drawn if it is less than twice the peak; the title always shows the used fraction.

    >>> steps(peaks(graph, plan, profiles, cluster), "memory.png")
    """
    figure = Figure(figsize=(9, 1.2 + 2.4 * len(peaks)), layout="constrained")
    found = figure.subplots(len(peaks), 1, squeeze=False)[:, 0]
    for axes, (name, peak) in zip(found, peaks.items(), strict=True):
        stack_parts(axes, peak.curve)
        high, part = peak.peak_bytes / 1e6, peak.peak_bytes / peak.budget_bytes
        title = f"{name}: {high:.4g} MB at most, margin included; {100 * part:.3g} % of its budget"
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        if peak.budget_bytes < 2 * peak.peak_bytes:
            axes.axhline(peak.budget_bytes / 1e6, color=INK, linestyle=(0, (4, 3)), label="budget")
            axes.set_ylim(0, 1.08 * max(high, peak.budget_bytes / 1e6))
    handles, labels = found[-1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    found[-1].set_xlabel("operator: forward | backward")
    figure.suptitle("One step's memory (simulated)", color=INK, x=0.01, ha="left")
    return save_png(figure, path)


def stack_parts(axes: Axes, curve: Mapping[str, Sequence[int]]) -> None:
    """Stack the parts of a memory curve, in MB, over the operators of forward and backward."""
    times = range(len(curve["throughout"]))
    parts = [[b / 1e6 for b in curve[part]] for part in MEMORY_PARTS]
    labels, colours = zip(*MEMORY_PARTS.values(), strict=True)
    axes.stackplot(times, parts, colors=colours, labels=labels, step="mid", linewidth=0)
    axes.axvline((len(times) - 1) / 2, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.35 * max(map(sum, zip(*parts, strict=True))))
    axes.set_xlim(0, len(times) - 1)
    axes.set_ylabel("MB")
    remove_frame(axes)

"""Draw the throughput of a job whose cards leave and return, with the events marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from qsync.figures.style import FAINT, INK, SERIES_COLOURS, save_png, strip_axes
from qsync.replayer.churn import ChurnEvent, ChurnReport

_KINDS = ("kill", "stop", "cont", "release", "join", "lighthouse")
_NUM_POINTS = 400
# Time units; the longest one that fits more than twice into the trace is used.
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def throughput(report: ChurnReport, events: Sequence[ChurnEvent], path: str | Path, *, model: str) -> Path:
    """Draw samples per second (simulated) over time, above a row of marks for each kind of event.

    >>> throughput(play(events, ranks, steps), events, "churn.png", model="gpt")
    """
    unit, unit_s = next(one for one in _UNITS if report.duration_s > 2 * one[1] or one[1] == 1.0)
    kinds = [kind for kind in _KINDS if any(event.kind == kind for event in events)]
    figure = Figure(figsize=(10, 3.6 + 0.25 * len(kinds)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[10, 0.2 + len(kinds)])
    times, samples = (np.array(column) for column in zip(*report.progress, strict=True))
    edges = np.linspace(0.0, report.duration_s, _NUM_POINTS + 1)
    rates = np.diff(np.interp(edges, times, samples)) / np.diff(edges)
    above.stairs(rates, edges / unit_s, color="#0072b2", fill=True, alpha=0.25)
    above.stairs(rates, edges / unit_s, color="#0072b2", linewidth=1.2, baseline=None)
    above.axhline(report.ideal_samples_per_s, color=FAINT, linestyle=(0, (4, 3)), label="all cards, no event")
    above.axhline(
        report.samples_per_s, color="#d55e00", linewidth=1.2, label=f"mean, {report.of_ideal:.1%} of that"
    )
    above.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    above.set_ylim(0, 1.08 * max(report.ideal_samples_per_s, float(rates.max())))
    above.set_ylabel("samples per second", color=INK)
    strip_axes(above, grid="y")
    marks = [[event.time_s / unit_s for event in events if event.kind == kind] for kind in kinds]
    alpha = max(0.05, min(1.0, 200 / max(1, len(events))))
    if kinds:
        below.eventplot(
            marks, lineoffsets=range(len(kinds)), linelengths=0.7, linewidths=1.0,
            colors=[SERIES_COLOURS[_KINDS.index(kind)] for kind in kinds], alpha=alpha,
        )  # fmt: skip
    below.set_yticks(range(len(kinds)), kinds)
    below.set_ylim(max(1, len(kinds)) - 0.5, -0.5)
    below.set_xlim(0, report.duration_s / unit_s)
    below.set_xlabel(f"{unit} since the start", color=INK)
    strip_axes(below, grid="x")
    figure.suptitle(f"{model} while cards leave and return (simulated)", x=0.01, ha="left", fontsize=11)
    return save_png(figure, path)

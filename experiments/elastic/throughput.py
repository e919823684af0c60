"""The picture of an elastic job: samples per second over time, with events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qsync.experiments.elastic.cluster import BATCH_SIZE
from qsync.experiments.elastic.events import NAMES
from qsync.experiments.harness.pictures import axes_of, legend_below, new_figure
from qsync.figures.style import INK, save_png

_MARKS = {"kill": "x", "two": "X", "stop": "s", "release": "v", "ask": "v", "join": "^", "lighthouse": "*"}
_BIN_S = 1.0


def draw(job: dict[str, Any], path: Path) -> None:
    """Draw samples per second, the number of cards, and each event."""
    ends = np.array([end for end, _ in job["steps"]])
    begin = ends[0]
    edges = np.arange(0.0, ends[-1] - begin + _BIN_S, _BIN_S)
    rate = np.histogram(ends - begin, edges)[0] * BATCH_SIZE / _BIN_S
    title = f"{len(job['events'])} events on {len(NAMES)} cards, half of them emulated"
    figure = new_figure(11, 4.5, title)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.fill_between(edges[:-1], rate, step="post", color="#4c78a8", alpha=0.6, linewidth=0)
    for kind, mark in _MARKS.items():
        times = [event["at"] - begin for event in job["events"] if event["kind"] == kind]
        top.scatter(times, [1.05 * rate.max()] * len(times), marker=mark, s=22, label=kind, zorder=3)
    axes_of(top, y="samples per second")
    bottom.step(ends - begin, [cards for _, cards in job["steps"]], where="post", color=INK)
    axes_of(bottom, x="seconds", y="cards", ylim=(0, len(NAMES) + 0.4))
    legend_below(figure, [top], ncols=len(_MARKS))
    save_png(figure, path, dpi=130)

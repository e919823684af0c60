"""Draw one training step as a lane per rank: compute, casts and waiting, and communication below."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypedDict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qsync.errors import QSyncError
from qsync.figures.style import INK, save_png, strip_axes
from qsync.records.profiles import shown
from qsync.replayer.timeline import Timeline

# Colours by kind of event, in the order of the legend.
KIND_COLOURS = {
    "loading": "#f0e442",
    "host": "#4d4d4d",
    "forward": "#56b4e9",
    "loss": "#cc79a7",
    "backward": "#0072b2",
    "cast": "#d55e00",
    "optimizer": "#009e73",
    "communication": "#e69f00",
    "wait": "#f0f1f3",
}


class Lane(TypedDict):
    """One rank's (or class's) step: events are (kind, start_s, duration_s)."""

    label: str
    events: Sequence[tuple[str, float, float]]


def timelines(
    lanes: Sequence[Lane],
    path: str | Path,
    *,
    simulated: bool,
    emulated: bool = False,
    title: str = "One training step",
) -> Path:
    """Draw one step as a lane per rank: compute, casts and waiting above, communication below.

    Events are (kind, start_s, duration_s), with a kind of KIND_COLOURS. Raises QSyncError for another kind or
    no lane.

    >>> timelines([{"label": "rank 0", "events": [("forward", 0.0, 0.25)]}], "timeline.png", simulated=False)
    """
    if not lanes:
        raise QSyncError("the timeline has no ranks; give at least one lane")
    figure = Figure(figsize=(11, 1.7 + 0.85 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for position, lane in enumerate(lanes):
        _draw_lane(axes, position, lane)
    end_s = max((start + duration for lane in lanes for _, start, duration in lane["events"]), default=0.0)
    axes.set_xlim(0, 1e3 * end_s * 1.001 or 1)
    axes.set_ylim(len(lanes) - 0.4, -0.55)
    axes.set_yticks(
        [position - 0.09 for position in range(len(lanes))], [_lane_label(lane, end_s) for lane in lanes]
    )
    axes.set_xlabel("ms since the step began", color=INK)
    strip_axes(axes, grid="x")
    present = {kind for lane in lanes for kind, _, _ in lane["events"]}
    handles = [_kind_patch(kind) for kind in KIND_COLOURS if kind in present]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False, fontsize=9
    )
    notes = ["simulated" if simulated else "measured", *(["emulated device"] if emulated else [])]
    figure.suptitle(f"{title} ({', '.join(notes)})", x=0.01, ha="left", fontsize=12, color=INK)
    return save_png(figure, path)


def lanes_of(timeline: Timeline, emulated: Collection[str] = ()) -> list[Lane]:
    """Return the lanes of a replayed timeline: one per device class, whose ranks are equal."""
    lanes: list[Lane] = []
    for name, entry in timeline.classes.items():
        events = [(e.kind, e.start_s, e.duration_s) for e in timeline.events if e.device_class == name]
        note = "\nemulated" if name in emulated else ""
        lanes.append({"label": f"{shown(name, entry.origin)} × {entry.num_ranks}{note}", "events": events})
    return lanes


def _draw_lane(axes: Axes, position: int, lane: Lane) -> None:
    for kind, colour in KIND_COLOURS.items():
        bars = [(1e3 * start, 1e3 * duration) for found, start, duration in lane["events"] if found == kind]
        place = (position + 0.17, 0.16) if kind == "communication" else (position - 0.32, 0.46)
        hatch = (
            {"hatch": "....", "edgecolor": "#c3c8cf", "linewidth": 0} if kind == "wait" else {"linewidth": 0}
        )
        axes.broken_barh(bars, place, facecolor=colour, **hatch)
    unknown = {kind for kind, _, _ in lane["events"]} - set(KIND_COLOURS)
    if unknown:
        known = ", ".join(KIND_COLOURS)
        raise QSyncError(f"{lane['label']} has events of the kind {min(unknown)!r}; use one of {known}")


def _lane_label(lane: Lane, end_s: float) -> str:
    waited_s = sum(duration for kind, _, duration in lane["events"] if kind == "wait")
    return f"{lane['label']}\nwaits {100 * waited_s / end_s:.0f} %" if end_s else lane["label"]


def _kind_patch(kind: str) -> Patch:
    if kind == "wait":
        return Patch(
            facecolor=KIND_COLOURS[kind], hatch="....", edgecolor="#c3c8cf", linewidth=0, label="waiting"
        )
    return Patch(facecolor=KIND_COLOURS[kind], label=kind)

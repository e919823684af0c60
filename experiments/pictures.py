"""The demo's pictures: which operator has which precision, one step of every rank, predicted against
measured.

Drawn without pyplot, so that no window system and no global state is involved. Colours are Okabe and Ito's,
which colour-blind readers tell apart; FP32 is grey, so that what was lowered stands out.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypedDict

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qsync.errors import QSyncError
from qsync.files import write_bytes
from qsync.graph import OpGraph
from qsync.plans import Plan
from qsync.precision import Precision
from qsync.profiles import Sensitivity, shown
from qsync.replayer.timeline import Timeline

INK, FAINT = "#333333", "#8a9099"

PRECISION_COLOURS = {
    Precision.FP32: "#d5dae0",
    Precision.TF32: "#56b4e9",
    Precision.BF16: "#0072b2",
    Precision.FP16: "#009e73",
    Precision.FP8: "#cc79a7",
    Precision.INT8: "#e69f00",
    Precision.INT8_ALL: "#d55e00",
}

# Kinds of events, in the order of the legend.
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

RUN_TITLES = {
    "fast_alone": "fast rank alone, FP32",
    "ddp_fp32": "plain DDP, FP32",
    "weak_bf16": "weak rank in BF16",
    "weak_int8": "weak rank in INT8",
    "all_int8": "everybody in INT8",
    "qsync": "qsync plan",
}


class Lane(TypedDict):
    """What one rank (or every rank of a class) does in a step: events are (kind, start_s, duration_s)."""

    label: str
    events: Sequence[tuple[str, float, float]]


def allocation(
    plan: Plan, graph: OpGraph, sensitivity: Sensitivity, path: str | Path, *, emulated: Collection[str] = ()
) -> Path:
    """Which adjustable operator has which precision on which class, in model order, above what each precision
    would cost.

    `emulated` names the classes that are emulated. Raises QSyncError if the graph has no adjustable operator.

    >>> allocation(plan, graph, sensitivity, "allocation.png", emulated={"weak"})
    """
    ops = [op.name for op in graph.adjustable]
    if not ops:
        raise QSyncError(
            f"{graph.model} has no operator whose precision can be chosen; there is nothing to draw"
        )
    classes = list(plan.classes)
    width = min(16.0, max(7.0, 2.5 + 0.22 * len(ops)))
    figure = Figure(figsize=(width, 3.6 + 0.42 * len(classes)), layout="constrained")
    rows, costs = figure.subplots(2, 1, sharex=True, height_ratios=[0.42 * len(classes), 2.0])
    _draw_assignments(rows, plan, ops)
    rows.set_yticks(range(len(classes)), [_class_label(name, plan, emulated) for name in classes])
    _draw_costs(costs, sensitivity, ops)
    _label_ops(costs, ops, width)
    shown = _shown_precisions(plan, sensitivity, ops)
    handles = [Patch(facecolor=PRECISION_COLOURS[precision], label=precision.upper()) for precision in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    note = " (emulated device)" if emulated else ""
    figure.suptitle(
        f"Precision of every operator of {graph.model}{note}", x=0.01, ha="left", fontsize=12, color=INK
    )
    return _save(figure, path)


def timelines(
    lanes: Sequence[Lane],
    path: str | Path,
    *,
    simulated: bool,
    emulated: bool = False,
    title: str = "One training step",
) -> Path:
    """One step as a lane per rank: compute, casts and waiting above, communication, which overlaps with it,
    below.

    Events are (kind, start_s, duration_s), with a kind of KIND_COLOURS. Raises QSyncError for another kind or
    no lane.

    >>> timelines([{"label": "rank 0", "events": [("forward", 0.0, 0.25)]}], "timeline.png", simulated=False)
    """
    if not lanes:
        raise QSyncError("there is no rank to draw a timeline of; give at least one lane")
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
    _plain(axes, grid="x")
    present = {kind for lane in lanes for kind, _, _ in lane["events"]}
    handles = [_kind_patch(kind) for kind in KIND_COLOURS if kind in present]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False, fontsize=9
    )
    notes = ["simulated" if simulated else "measured", *(["emulated device"] if emulated else [])]
    figure.suptitle(f"{title} ({', '.join(notes)})", x=0.01, ha="left", fontsize=12, color=INK)
    return _save(figure, path)


def lanes_of(timeline: Timeline, emulated: Collection[str] = ()) -> list[Lane]:
    """The lanes of a replayed timeline: one per device class, whose ranks all do the same."""
    lanes: list[Lane] = []
    for name, entry in timeline.classes.items():
        events = [(e.kind, e.start_s, e.duration_s) for e in timeline.events if e.device_class == name]
        note = "\nemulated" if name in emulated else ""
        lanes.append({"label": f"{shown(name, entry.origin)} × {entry.num_ranks}{note}", "events": events})
    return lanes


def predicted_vs_measured(
    runs: Mapping[str, Mapping[str, float | None]], path: str | Path, *, emulated: bool = False
) -> Path:
    """Measured and predicted step of every run, with a line at the limit: the fast rank alone.

    `runs` is that of report.json: run -> measured_step_s and predicted_step_s (s), of which either may be
    missing. Raises QSyncError if there is no run.

    >>> predicted_vs_measured(report["runs"], "steps.png", emulated=True)
    """
    if not runs:
        raise QSyncError("there is no run to draw; give the runs of a report")
    figure = Figure(figsize=(9, 1.5 + 0.72 * len(runs)), layout="constrained")
    axes = figure.subplots()
    limit_s = runs.get("fast_alone", {}).get("measured_step_s")
    longest_s = max((_value(run, key) for run in runs.values() for key in _STEP_BARS), default=0.0) or 1.0
    for position, run in enumerate(runs.values()):
        _draw_run(axes, position, run, limit_s)
    axes.set_xlim(0, 1.24 * 1e3 * longest_s)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_yticks(range(len(runs)), [RUN_TITLES.get(name, name) for name in runs])
    axes.set_xlabel("step time, ms", color=INK)
    _plain(axes, grid="x")
    handles: list[Patch | Line2D] = [Patch(**style, label=label) for label, style in _STEP_BARS.values()]
    if limit_s:
        axes.axvline(1e3 * limit_s, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
        handles.append(
            Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="limit: fast rank alone")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    note = " (emulated device)" if emulated else ""
    figure.suptitle(f"Step time, predicted and measured{note}", x=0.01, ha="left", fontsize=12, color=INK)
    return _save(figure, path)


# What is drawn of a run: (label, style of its bar).
_STEP_BARS = {
    "measured_step_s": ("measured", {"facecolor": "#0072b2", "edgecolor": "#0072b2"}),
    "predicted_step_s": (
        "predicted (simulated)",
        {"facecolor": "#ffffff", "edgecolor": "#0072b2", "hatch": "////"},
    ),
}


def _draw_assignments(axes: Axes, plan: Plan, ops: Sequence[str]) -> None:
    known = list(PRECISION_COLOURS)
    cells = [
        [known.index(class_plan.assignment.get(op, Precision.FP32)) for op in ops]
        for class_plan in plan.classes.values()
    ]
    axes.imshow(
        cells,
        cmap=ListedColormap(list(PRECISION_COLOURS.values())),
        vmin=-0.5,
        vmax=len(known) - 0.5,
        aspect="auto",
    )
    for row in range(1, len(cells)):
        axes.axhline(row - 0.5, color="white", linewidth=4)
    if len(ops) <= 60:  # beyond that the gaps would eat the cells
        for column in range(1, len(ops)):
            axes.axvline(column - 0.5, color="white", linewidth=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=INK, labelbottom=False, labelsize=9)


def _draw_costs(axes: Axes, sensitivity: Sensitivity, ops: Sequence[str]) -> None:
    """A point for each precision that was assessed, joined by a line from the least to the greatest."""
    size = 26 if len(ops) <= 60 else 9
    for precision, colour in PRECISION_COLOURS.items():
        points = [(i, sensitivity.omega.get(op, {}).get(precision, 0.0)) for i, op in enumerate(ops)]
        points = [(i, omega) for i, omega in points if omega > 0]  # a log axis has no zero
        if points:
            axes.scatter(*zip(*points, strict=True), s=size, color=colour, zorder=3, linewidths=0)
    for i, op in enumerate(ops):
        values = [omega for omega in sensitivity.omega.get(op, {}).values() if omega > 0]
        if values:
            axes.plot([i, i], [min(values), max(values)], color="#c9ced6", linewidth=1, zorder=1)
    axes.set_yscale("log")
    axes.set_ylabel("added variance\n(squared gradient norm)", color=INK, fontsize=9)
    axes.set_xlim(-0.5, len(ops) - 0.5)
    _plain(axes, grid="y")


def _label_ops(axes: Axes, ops: Sequence[str], width: float) -> None:
    """Names of single operators where they fit; of blocks otherwise, as many as fit; and a rule between
    blocks."""
    blocks = [(block, len(list(members))) for block, members in groupby(ops, key=block_of)]
    begin, middles = 0, []
    for block, num_members in blocks:
        middles.append((begin + (num_members - 1) / 2, block))
        begin += num_members
        if begin < len(ops):
            axes.axvline(begin - 0.5, color="#c9ced6", linewidth=0.8, zorder=0)
    if len(ops) <= 60:
        axes.set_xticks(range(len(ops)), ops)
    else:
        inches_per_op = (width - 1.8) / len(ops)
        kept: list[tuple[float, str]] = []
        for middle, block in middles:
            if not kept or (middle - kept[-1][0]) * inches_per_op > 0.17:
                kept.append((middle, block))
        axes.set_xticks([middle for middle, _ in kept], [block for _, block in kept])
    axes.tick_params(axis="x", labelrotation=90, labelsize=7.5)


def block_of(op: str) -> str:
    """The block an operator belongs to: its name up to its first numbers, or the first part if it has none.

    >>> block_of("encoder.layer.3.attention.query"), block_of("stages.1.0.shortcut.0"), block_of("head")
    ('encoder.layer.3', 'stages.1.0', 'head')
    """
    parts = op.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if first is None:
        return parts[0]
    end = next((i for i in range(first, len(parts)) if not parts[i].isdigit()), len(parts))
    return ".".join(parts[:end])


def _shown_precisions(plan: Plan, sensitivity: Sensitivity, ops: Sequence[str]) -> list[Precision]:
    assigned = {
        precision for class_plan in plan.classes.values() for precision in class_plan.assignment.values()
    }
    assessed = {name for op in ops for name, omega in sensitivity.omega.get(op, {}).items() if omega > 0}
    return [precision for precision in PRECISION_COLOURS if precision in assigned or precision in assessed]


def _class_label(name: str, plan: Plan, emulated: Collection[str]) -> str:
    lowered, total = len(plan.classes[name].lowered), len(plan.classes[name].assignment)
    note = " (emulated)" if name in emulated else ""
    return f"{shown(name, plan.classes[name].origin)}{note}\n{lowered} of {total} lowered"


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
            text,
            at,
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
            bbox=plate,
        )


def _value(run: Mapping[str, float | None], key: str) -> float:
    return run.get(key) or 0.0


def _plain(axes: Axes, grid: str) -> None:
    """Only the lines that carry information."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.grid(axis=grid, color="#e6e9ed", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _save(figure: Figure, path: str | Path) -> Path:
    """Write the PNG whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    return write_bytes(path, drawn.getvalue())

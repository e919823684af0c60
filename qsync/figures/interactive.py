"""Interactive figures of a plan (plotly): precisions, costs, timeline, trade-off, memory.

Colours are those of the pictures. The page sets colours of text and axes, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from qsync.figures.style import FAINT, MEMORY_PARTS, PRECISION_COLOURS, SERIES_COLOURS
from qsync.figures.timeline import KIND_COLOURS
from qsync.operators.precision import Precision
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Sensitivity
from qsync.replayer import Peak
from qsync.replayer.timeline import Event, Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Memory that lasts the whole step is a darker grey than in pictures, to suit light and dark pages.
_MEMORY_PARTS = MEMORY_PARTS | {"throughout": (MEMORY_PARTS["throughout"][0], "#a9b4c2")}
_PATH = "critical path"
_MOST_LABELS = 8  # labels on a logarithmic axis


def _figure(height: int, x: str = "", y: str = "", **layout: Any) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
    figure.update_layout(
        height=height, margin={"l": 8, "r": 8, "t": 34, "b": 8}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", modebar={"bgcolor": "rgba(0,0,0,0)"}, legend=legend,
        hovermode="closest", **layout,
    )  # fmt: skip
    figure.update_xaxes(title_text=x, automargin=True)
    figure.update_yaxes(title_text=y, automargin=True)
    return figure


def precision_map(
    plan: Plan, graph: OpGraph, classes: Sequence[str], notes: Mapping[tuple[str, str], str]
) -> Figure:
    """Return a map of precisions: a row per class, a cell per adjustable operator.

    `classes` sets the order of rows. `notes` maps (class, operator) to additional hover text.
    """
    used = {p for own in plan.classes.values() for p in own.assignment.values()}
    known = [precision for precision in PRECISION_COLOURS if precision in used or precision is Precision.FP32]
    cells, texts = [], []
    for name in classes:
        own = plan[name]
        chosen = [own.assignment.get(op.name, Precision.FP32) for op in graph.adjustable]
        cells.append([known.index(precision) for precision in chosen])
        texts.append([
            "<br>".join([
                f"<b>{escape(op.name)}</b>", f"{op.kind}, {precision.upper()} on {escape(name)}",
                notes.get((name, op.name), ""),
            ])
            for op, precision in zip(graph.adjustable, chosen, strict=True)
        ])  # fmt: skip
    figure = _figure(150 + 60 * len(cells))
    # Each colour spans a step of the scale, so that none blends into another.
    scale = [[place / len(known), PRECISION_COLOURS[p]] for k, p in enumerate(known) for place in (k, k + 1)]
    figure.add_heatmap(
        z=cells, x=[op.name for op in graph.adjustable], y=list(classes), zmin=-0.5,
        zmax=len(known) - 0.5, colorscale=scale,
        colorbar={"tickvals": list(range(len(known))), "ticktext": [p.upper() for p in known]},
        customdata=texts, hovertemplate="%{customdata}<extra></extra>", xgap=1, ygap=6,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    return figure


def sensitivities(sensitivity: Sensitivity, graph: OpGraph) -> Figure:
    """Return a figure of the variance that each precision adds to every operator."""
    figure = _figure(330, y="added variance")
    for precision, colour in PRECISION_COLOURS.items():
        points = [
            (op.name, sensitivity.omega.get(op.name, {}).get(precision, 0.0)) for op in graph.adjustable
        ]
        points = [(name, omega) for name, omega in points if omega > 0.0]  # a log axis has no zero
        if points:
            names, omegas = zip(*points, strict=True)
            figure.add_scatter(
                x=names, y=omegas, mode="markers", name=precision.upper(), marker={"color": colour},
                hovertemplate="%{x}: %{y:.2e}",
            )  # fmt: skip
    _logarithmic(figure, [value for trace in figure.data for value in trace.y])
    figure.update_xaxes(categoryorder="array", categoryarray=[op.name for op in graph.adjustable])
    return figure


def timeline(found: Timeline, path: Sequence[Event] = ()) -> Figure:
    """Return a timeline of one step: compute and communication per class, and the critical path."""
    lanes = [lane for name in found.classes for lane in (name, f"{name}: communication")]
    lanes += [_PATH] if path else []
    placed = [(_lane(event), event) for event in found.events] + [(_PATH, event) for event in path]
    figure = _figure(110 + 44 * len(lanes), x="ms since the step began", barmode="overlay", dragmode="zoom")
    for kind, colour in KIND_COLOURS.items():
        own = [(lane, event) for lane, event in placed if event.kind == kind and event.duration_s > 0.0]
        if own:
            figure.add_bar(
                orientation="h", name=kind, marker={"color": colour, "line": {"width": 0}},
                base=[1e3 * event.start_s for _, event in own],
                x=[1e3 * event.duration_s for _, event in own],
                y=[lane for lane, _ in own], customdata=[event.name for _, event in own],
                hovertemplate="%{customdata}: %{x:.3f} ms",
            )  # fmt: skip
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], fixedrange=True)
    return figure


def _lane(event: Event) -> str:
    return event.device_class + (": communication" if event.kind == "communication" else "")


def trade(plans: Sequence[Plan], chosen: Plan) -> Figure:
    """Return a figure of step time against added variance: Pareto-optimal plans and the chosen one.

    Variance is logarithmic; a plan that adds none is drawn below all others.
    """
    every = [plan.added_variance or 0.0 for plan in (*plans, chosen)]
    least = min((value for value in every if value > 0.0), default=1.0)
    figure = _figure(360, x="step, ms", y="added variance")

    def points(of: Sequence[Plan], name: str, **style: Any) -> None:
        texts = [
            (
                f"{plan.added_variance:.2e}" if plan.added_variance else "none",
                "<br>".join(
                    f"{escape(c)}: {len(own.lowered)} of {len(own.assignment)} lowered"
                    for c, own in plan.classes.items()
                ),
            )
            for plan in of
        ]
        figure.add_scatter(
            x=[1e3 * (plan.step_s or 0.0) for plan in of], name=name, customdata=texts,
            y=[max(plan.added_variance or 0.0, least / 3) for plan in of],
            hovertemplate="%{x:.2f} ms, %{customdata[0]}<br>%{customdata[1]}", **style,
        )  # fmt: skip

    points(plans, "no plan is better in both", mode="lines+markers", line={"color": FAINT, "shape": "hv"})
    points(
        [chosen], "chosen", mode="markers", marker={"color": SERIES_COLOURS[4], "size": 14, "symbol": "star"}
    )
    _logarithmic(figure, every)
    return figure


def _logarithmic(figure: Figure, values: Sequence[float]) -> None:
    """Make the y axis logarithmic with few labels; without labels if all values are 0."""
    positive = [value for value in values if value > 0.0]
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    figure.update_yaxes(
        type="log", exponentformat="power", dtick=max(1, math.ceil(decades / _MOST_LABELS)),
        showticklabels=bool(positive),
    )  # fmt: skip


def memory(peaks: Mapping[str, Peak], graph: OpGraph) -> Figure:
    """Return a figure of each class's memory by part over a step, forward then backward."""
    forward = [op.name for op in graph.ops]
    names = [*forward, *(f"{name}, backward" for name in reversed(forward))]
    figure = _figure(60 + 230 * len(peaks))
    figure.set_subplots(len(peaks), 1, shared_xaxes=True, vertical_spacing=0.08)
    for row, (name, peak) in enumerate(peaks.items(), 1):
        figure.update_yaxes(title_text=f"{name}, MiB", row=row, col=1)
        for part, (label, colour) in _MEMORY_PARTS.items():
            curve = peak.curve[part]
            figure.add_scatter(
                y=[num_bytes / 2**20 for num_bytes in curve], name=label, legendgroup=part,
                showlegend=row == 1,
                stackgroup="bytes", line={"width": 0, "shape": "hv"}, fillcolor=colour,
                text=names if len(names) == len(curve) else None, hovertemplate="%{y:.1f} MiB<br>%{text}",
                row=row, col=1,
            )  # fmt: skip
        if peak.budget_bytes < 2 * peak.peak_bytes:
            figure.add_hline(peak.budget_bytes / 2**20, line_dash="dash", line_color=FAINT, row=row, col=1)
    figure.update_xaxes(title_text="operator: forward, then backward", row=len(peaks), col=1)
    return figure


def steps_of_runs(runs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return measured and predicted steps of every training method; a line marks the fastest cards alone."""
    figure = _figure(90 + 46 * len(runs), x="step, ms", barmode="group")
    bars = (("measured", "measured_step_s"), ("predicted before training", "planned_step_s"))
    for (label, key), colour in zip(bars, SERIES_COLOURS, strict=False):
        figure.add_bar(
            orientation="h", name=label, y=[run.get("title", name) for name, run in runs.items()],
            marker={"color": colour},
            x=[1e3 * run[key] if run.get(key) else None for run in runs.values()],
            hovertemplate="%{y}: %{x:.1f} ms",
        )  # fmt: skip
    limit_s = runs.get("alone", {}).get("measured_step_s")
    if limit_s:
        figure.add_vline(1e3 * limit_s, line_dash="dash", line_color=FAINT)
    figure.update_yaxes(autorange="reversed")
    return figure


def phases_of_ranks(ranks: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure of each rank's step phases, measured above predicted."""
    rows = [
        (f"rank {one['rank']} ({one['device_class']}), {kind}", one[kind])
        for one in ranks for kind in ("measured", "predicted")
    ]  # fmt: skip
    figure = _figure(90 + 40 * len(rows), x="step, ms", barmode="stack")
    for phase, colour in zip(rows[0][1], (*SERIES_COLOURS, FAINT), strict=False):
        figure.add_bar(
            orientation="h", name=phase, y=[name for name, _ in rows], marker={"color": colour},
            x=[1e3 * seconds[phase] for _, seconds in rows], hovertemplate="%{x:.2f} ms",
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    return figure


def losses(curves: Mapping[str, Sequence[tuple[float, float]]], x: str) -> Figure:
    """Return loss curves by name, from points (x, loss)."""
    figure = _figure(360, x=x, y="loss")
    for colour, (name, points) in zip(
        SERIES_COLOURS * math.ceil(len(curves) / 8), curves.items(), strict=False
    ):
        figure.add_scatter(
            x=[at for at, _ in points], y=[loss for _, loss in points], name=name, mode="lines",
            line={"color": colour}, hovertemplate="%{y:.4f}",
        )  # fmt: skip
    return figure

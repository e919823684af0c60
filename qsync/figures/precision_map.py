"""Draw the precision of each operator on each class, above each precision's cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qsync.errors import QSyncError
from qsync.figures.style import INK, PRECISION_COLOURS, save_png, strip_axes
from qsync.operators.precision import Precision
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Sensitivity, shown


def allocation(
    plan: Plan, graph: OpGraph, sensitivity: Sensitivity, path: str | Path, *, emulated: Collection[str] = ()
) -> Path:
    """Draw the precision of every adjustable operator on every class, above the cost of each precision.

    Operators stand in model order. `emulated` names the classes that are emulated. Raises QSyncError if
    the graph has no adjustable operator.

    >>> allocation(plan, graph, sensitivity, "allocation.png", emulated={"weak"})
    """
    ops = [op.name for op in graph.adjustable]
    if not ops:
        raise QSyncError(
            f"{graph.model} has no operator whose precision can be chosen; give the graph of a model with "
            "products"
        )
    classes = list(plan.classes)
    width = min(16.0, max(7.0, 2.5 + 0.22 * len(ops)))
    figure = Figure(figsize=(width, 3.6 + 0.42 * len(classes)), layout="constrained")
    rows, costs = figure.subplots(2, 1, sharex=True, height_ratios=[0.42 * len(classes), 2.0])
    _draw_assignments(rows, plan, ops)
    rows.set_yticks(range(len(classes)), [_class_label(name, plan, emulated) for name in classes])
    _draw_costs(costs, sensitivity, ops)
    _label_ops(costs, ops, width)
    precisions = _shown_precisions(plan, sensitivity, ops)
    handles = [Patch(facecolor=PRECISION_COLOURS[p], label=p.upper()) for p in precisions]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    note = " (emulated device)" if emulated else ""
    figure.suptitle(
        f"Precision of every operator of {graph.model}{note}", x=0.01, ha="left", fontsize=12, color=INK
    )
    return save_png(figure, path)


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
    if len(ops) <= 60:  # beyond that the gaps would hide the cells
        for column in range(1, len(ops)):
            axes.axvline(column - 0.5, color="white", linewidth=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=INK, labelbottom=False, labelsize=9)


def _draw_costs(axes: Axes, sensitivity: Sensitivity, ops: Sequence[str]) -> None:
    """Draw a point for each assessed precision, with a line from the least to the greatest."""
    size = 26 if len(ops) <= 60 else 9
    for precision, colour in PRECISION_COLOURS.items():
        points = [(i, sensitivity.omega.get(op, {}).get(precision, 0.0)) for i, op in enumerate(ops)]
        points = [(i, omega) for i, omega in points if omega > 0]  # a log axis has no zero
        if points:
            at, omegas = zip(*points, strict=True)
            axes.scatter(at, omegas, s=size, color=colour, zorder=3, linewidths=0)
    for i, op in enumerate(ops):
        values = [omega for omega in sensitivity.omega.get(op, {}).values() if omega > 0]
        if values:
            axes.plot([i, i], [min(values), max(values)], color="#c9ced6", linewidth=1, zorder=1)
    axes.set_yscale("log")
    axes.set_ylabel("added variance\n(squared gradient norm)", color=INK, fontsize=9)
    axes.set_xlim(-0.5, len(ops) - 0.5)
    strip_axes(axes, grid="y")


def _label_ops(axes: Axes, ops: Sequence[str], width: float) -> None:
    """Label operators, or blocks if operators do not fit, with a line between blocks."""
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
        labelled: list[tuple[float, str]] = []
        for middle, block in middles:
            if not labelled or (middle - labelled[-1][0]) * inches_per_op > 0.17:
                labelled.append((middle, block))
        axes.set_xticks([middle for middle, _ in labelled], [block for _, block in labelled])
    axes.tick_params(axis="x", labelrotation=90, labelsize=7.5)


def block_of(op: str) -> str:
    """Return an operator's block: its name up to the first numbers, or its first part.

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

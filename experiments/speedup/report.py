"""Samples per second against the fast card alone: rows, promises, tables, and the picture of the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync import Cluster, Plan, Precision
from qsync.experiments.harness import Bar, bar, table_of
from qsync.experiments.speedup.ways import (
    ALL_INT8,
    ALONE,
    DDP,
    LB_BSP,
    QSYNC,
    QSYNC_FASTEST,
    QSYNC_SHARE,
    TITLES,
    UNIFORM,
    WEAK_16,
    WEAK_INT8,
    rate,
    samples_of,
)

Problem = Mapping[str, Any]
_EQUAL = 0.01  # rates that differ by no more are equal: steps on this machine repeat to about that
_FASTER = "uniform choices of no more variance that are faster than the plan"
_BY_SHARES = "problems in which LB-BSP is faster than the plan with shares"
STEP_ERROR = "|predicted / measured - 1| of steps, median"
_DRAWN = (DDP, LB_BSP, WEAK_16, WEAK_INT8, QSYNC, QSYNC_FASTEST)


def row(plan: Plan, cluster: Cluster, samples: int, turns_s: Sequence[float] = ()) -> dict[str, Any]:
    """Return what a way takes and adds: so many samples were profiled; `turns_s` were measured, if any."""
    step_s = sorted(turns_s)[len(turns_s) // 2] if turns_s else None
    return {
        "predicted_s": plan.step_s, "step_s": step_s or plan.step_s, "turns_s": list(turns_s),
        "samples_per_s": rate(plan, cluster, samples, step_s), "added_variance": plan.added_variance,
        "samples": samples_of(plan, samples),
        "lowered": {name: len(entry.lowered) for name, entry in plan.classes.items()},
        "precisions": {name: sorted(set(entry.assignment.values())) for name, entry in plan.classes.items()},
    }  # fmt: skip


def relative(problem: Problem, way: str) -> float:
    """Return the samples per second of a way over those of one fast card alone."""
    found = problem["ways"]
    return float(found[way]["samples_per_s"] / found[ALONE]["samples_per_s"])


def title(problem: Problem) -> str:
    """Say what a problem is, without its model."""
    where = problem.get("pair") or f"{problem['share']:g}"
    more = f", {problem['ranks']} ranks" if problem["ranks"] != 2 else ""
    return f"{where}{more}{', measured' if problem.get('measured') else ''}"


def bars(problems: Sequence[Problem]) -> list[Bar]:
    """Return the promises: nothing that adds no more variance is faster, and predicted steps are right."""
    faster = [
        f"{one['model']}, {title(one)}: {TITLES[way]}"
        for one in problems
        for way in UNIFORM
        if one["ways"][way]["added_variance"] <= one["ways"][QSYNC]["added_variance"]
        and relative(one, way) > (1 + _EQUAL) * relative(one, QSYNC)
    ]
    by_shares = [
        f"{one['model']}, {title(one)}"
        for one in problems
        if relative(one, LB_BSP) > (1 + _EQUAL) * relative(one, QSYNC_SHARE)
    ]
    errors = sorted(
        abs(row["predicted_s"] / row["step_s"] - 1)
        for one in problems if one.get("measured") for row in one["ways"].values()
    )  # fmt: skip
    found = [
        bar(_FASTER, len(faster), 0, which=faster),
        bar(_BY_SHARES, len(by_shares), 0, which=by_shares),
    ]
    if errors:
        found.append(bar(STEP_ERROR, errors[len(errors) // 2], 0.05))
    return found


def note(bars: Sequence[Bar], problems: Sequence[Problem]) -> str:
    """Say below the tables where a promise does not hold, and what INT8 was."""
    used = {
        p for one in problems if "pair" not in one
        for own in one["ways"][ALL_INT8]["precisions"].values() for p in own
    }  # fmt: skip
    about = (
        "INT8 is `int8_all`, but for pairs of GPUs: this processor multiplies 16 bits no faster than FP32."
    )
    named = [about] if Precision.INT8_ALL in used else []
    named += [f"{one['name']}: {', '.join(one['which'])}." for one in bars if one.get("which")]
    picture = (
        "![Samples per second by the weak card's speed, for every way to use it](../figures/speedup.png)\n"
    )
    return "\n".join(["", picture, "gloo, one thread a rank.", *named])


def table(problems: Sequence[Problem]) -> Table:
    """Return samples per second of every way, with the variance that it adds, by model and problem."""
    found = {(one["model"], title(one)): one for one in problems}
    models, columns = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    rows = [
        [
            model,
            TITLES[way],
            *(_cell(found[model, at], way) if (model, at) in found else "-" for at in columns),
        ]
        for model in models
        for way in TITLES
    ]
    own = [number for number, row in enumerate(rows) if row[1] == TITLES[QSYNC]]
    about = "Samples per second against the fast cards alone (added variance)"
    return table_of(about, ("", "", *columns), rows, left=2, bold=own)


def _cell(problem: Problem, way: str) -> str:
    variance = problem["ways"][way]["added_variance"]
    more = f" ({variance:.0e})" if variance else ""
    return f"{relative(problem, way):.2f}x{more}"


def draw(problems: Sequence[Problem], path: Path) -> None:
    """Draw samples per second by the weak card's speed, a panel a model, and bars of pairs of GPUs."""
    from matplotlib.figure import Figure  # takes long to import

    from qsync.figures.style import FAINT, INK, SERIES_COLOURS, save_png, strip_axes

    models = list(dict.fromkeys(one["model"] for one in problems))
    blue, orange, green, _, red, *_ = SERIES_COLOURS
    colours = dict(zip(_DRAWN, (FAINT, INK, orange, green, blue, red), strict=True))
    figure = Figure(figsize=(3.4 * (len(models) + 1), 3.9), layout="constrained")
    figure.suptitle("Samples per second with a weak card, against the fast card alone", x=0.01, ha="left")
    panels = figure.subplots(1, len(models) + 1, sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        own = [one for one in problems if one["model"] == model and "share" in one and one["ranks"] == 2]
        for way, colour in colours.items():
            line = {"linewidth": 2.4 if way == QSYNC else 1.4, "label": TITLES[way]}
            for measured, style in ((False, line), (True, {"linestyle": "", "marker": "o", "markersize": 5})):
                found = [one for one in own if bool(one.get("measured")) is measured]
                at = [one["share"] for one in found]
                axes.plot(at, [relative(one, way) for one in found], color=colour, **style)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_title(f"{model}: replayed (lines), measured (dots)", fontsize=8, loc="left")
        axes.set_xlabel("speed of the weak card", fontsize=9)
    pairs = [one for one in problems if one["model"] == models[0] and "pair" in one]
    for number, (way, colour) in enumerate(colours.items()):
        at = [place + 0.13 * (number - len(colours) / 2) for place in range(len(pairs))]
        panels[-1].bar(at, [relative(one, way) for one in pairs], width=0.12, color=colour)
    panels[-1].set_xticks(range(len(pairs)), [one["pair"] for one in pairs])
    panels[-1].set_title(f"{models[0]}: simulated from data sheets", fontsize=8, loc="left")
    panels[0].set_ylabel("x the fast card alone", fontsize=9)
    for axes in panels:
        strip_axes(axes, grid="y")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, frameon=False, ncols=3
    )
    save_png(figure, path)

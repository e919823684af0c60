"""Report samples per second relative to the fast card alone: rows, bars, tables, README's picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync import Cluster, Plan
from qsync.experiments.harness import Bar, bar, table_of
from qsync.experiments.mixed.report import NOISIER, SLOWER, UNSAID
from qsync.experiments.mixed.ways import (
    ALL_16,
    ALONE,
    DDP,
    LB_BSP,
    QSYNC_ALL,
    QSYNC_SHARE,
    TITLES,
    WEAK_16,
    WEAK_INT8,
    rate,
    samples_by_class,
)

Problem = Mapping[str, Any]
STEP_ERROR = "|predicted / measured - 1| of steps, median"
_SHARE_ERROR = "|predicted / measured - 1| of steps with shares, {}"
_DRAWN = (DDP, LB_BSP, WEAK_16, WEAK_INT8, ALL_16, QSYNC_SHARE, QSYNC_ALL)
_OWN = (QSYNC_SHARE, QSYNC_ALL)


def simulated_row(plan: Plan, cluster: Cluster, samples: int) -> dict[str, Any]:
    """Return a row of a way's predicted step and variance, for the profiled number of samples."""
    return {
        "predicted_s": plan.step_s, "samples_per_s": rate(plan, cluster, samples),
        "added_variance": plan.added_variance, "samples": samples_by_class(plan, samples),
    }  # fmt: skip


def measured_row(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a way's measured step and variance on two ranks."""
    step_s = run["measured_step_s"]
    return {
        "predicted_s": run["predicted_step_s"], "planned_s": run["planned_step_s"], "step_s": step_s,
        "turns_s": run["turns_s"], "samples_per_s": run["samples_a_step"] / step_s,
        "added_variance": run["added_variance"], "samples": run["samples"],
    }  # fmt: skip


def relative(problem: Problem, way: str) -> float:
    """Return a way's samples per second relative to one fast card alone."""
    found = problem["ways"]
    return float(found[way]["samples_per_s"] / found[ALONE]["samples_per_s"])


def title(problem: Problem) -> str:
    """Describe a problem without its model."""
    return str(problem["pair"] if "pair" in problem else f"{problem['share']:g}, measured")


def bars(problems: Sequence[Problem]) -> list[Bar]:
    """Return the bars of all measured points, and of the prediction errors."""
    measured = [one for one in problems if "share" in one]
    if not measured:
        return []
    found = []
    for name in (SLOWER, NOISIER, UNSAID):
        own = [(one, each) for one in measured for each in one["bars"] if each["name"] == name]
        which = [
            f"{one['model']} at {one['share']:g}: {way}" for one, each in own for way in each.get("which", ())
        ]
        found.append(bar(name, sum(each["measured"] for _, each in own), 0, which=which))
    errors = {
        (number, way): abs(row["predicted_s"] / row["step_s"] - 1)
        for number, one in enumerate(measured) for way, row in one["ways"].items()
    }  # fmt: skip
    shared = [
        error for (number, way), error in errors.items()
        if len(set(measured[number]["ways"][way]["samples"].values())) > 1
    ]  # fmt: skip
    found.append(bar(STEP_ERROR, statistics.median(errors.values()), 0.05))
    if shared:
        found.append(bar(_SHARE_ERROR.format("median"), statistics.median(shared), 0.03))
        found.append(bar(_SHARE_ERROR.format("worst"), max(shared), 0.08))
    return found


def note(bars: Sequence[Bar]) -> str:
    """Show the picture below the tables, and list failed bars."""
    named = [f"{one['name']}: {', '.join(one['which'])}." for one in bars if one.get("which")]
    picture = (
        "![Samples per second by the weak card's speed, for every way to use it](../figures/speedup.png)\n"
    )
    return "\n".join(["", picture, "gloo, one thread a rank.", *named])


def table(problems: Sequence[Problem]) -> Table:
    """Return a table of every way's samples per second and added variance, a row per problem."""
    used = [way for way in TITLES if any(way in one["ways"] for one in problems)]
    rows = [[one["model"], title(one), *(_cell(one, way) for way in used)] for one in problems]
    about = "Samples per second against the fast card alone (added variance)"
    return table_of(about, ("", "", *(TITLES[way] for way in used)), rows, left=2)


def _cell(problem: Problem, way: str) -> str:
    if way not in problem["ways"]:
        return "-"
    variance = problem["ways"][way]["added_variance"]
    more = f" ({variance:.0e})" if variance else ""
    return f"{relative(problem, way):.2f}x{more}"


def draw(problems: Sequence[Problem], path: Path) -> None:
    """Draw samples per second by the weak card's speed, a panel per model, and simulated GPUs as bars."""
    from matplotlib.figure import Figure  # slow to import

    from qsync.figures.style import FAINT, INK, SERIES_COLOURS, save_png, strip_axes

    measured, pairs = ([one for one in problems if key in one] for key in ("share", "pair"))
    models = list(dict.fromkeys(one["model"] for one in measured))
    blue, orange, green, purple, _, sky, *_ = SERIES_COLOURS
    colours = dict(zip(_DRAWN, (FAINT, INK, orange, green, purple, blue, sky), strict=True))
    figure = Figure(figsize=(3.4 * (len(models) + 1), 3.9), layout="constrained")
    figure.suptitle("Samples per second with a weak card, against the fast card alone", x=0.01, ha="left")
    panels = figure.subplots(1, len(models) + 1, sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        for way, colour in colours.items():
            own = [one for one in measured if one["model"] == model and way in one["ways"]]
            line = {"linewidth": 2.4 if way in _OWN else 1.3, "marker": "o", "markersize": 4}
            at, rates = [one["share"] for one in own], [relative(one, way) for one in own]
            axes.plot(at, rates, color=colour, label=TITLES[way], **line)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_title(f"{model}: measured", fontsize=8, loc="left")
        axes.set_xlabel("speed of the weak card (emulated)", fontsize=9)
    for number, (way, colour) in enumerate(colours.items()):
        found = [(place, one) for place, one in enumerate(pairs) if way in one["ways"]]
        at = [place + 0.12 * (number - len(colours) / 2) for place, _ in found]
        panels[-1].bar(at, [relative(one, way) for _, one in found], width=0.11, color=colour)
    panels[-1].set_xticks(range(len(pairs)), [one["pair"] for one in pairs])
    panels[-1].set_title("pairs of GPUs: simulated from data sheets", fontsize=8, loc="left")
    panels[0].set_ylabel("x the fast card alone", fontsize=9)
    for axes in panels:
        strip_axes(axes, grid="y")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, frameon=False, ncols=3
    )
    save_png(figure, path)

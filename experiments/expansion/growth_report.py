"""The report of compare_growth.py: what each method saves, as a table and as curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from rich.table import Table

from qsync.experiments.harness import bar, grouped, table_of
from qsync.experiments.harness.emulated_profiles import HALF
from qsync.experiments.harness.pictures import axes_of, legend_below, new_figure
from qsync.figures.style import FAINT, INK, save_png

Row = Mapping[str, Any]
Rows = Sequence[Row]

BAR = 0.30  # of the tokens, to be saved
_SAYS = {
    "source": "the source",
    "scratch": "from scratch",
    "expanded": "expanded",
    "even": "even split",
    "stacked": "stacked and tiled",
    "plan": "expanded, hybrid plan",
}
# Okabe and Ito's, which colour-blind readers tell apart.
_COLOURS = {
    "scratch": INK, "source": FAINT, "expanded": "#0072b2", "even": "#e69f00", "stacked": "#d55e00",
    "plan": "#009e73",
}  # fmt: skip


def reached(curve: Sequence[Mapping[str, float]], loss: float) -> float | None:
    """Return the tokens (images) after which the held-out loss stays at or below `loss`; None if never.

    Between two points of the curve it is taken to be straight. That a noisy curve dips below does not count.
    """
    if curve[-1]["heldout"] > loss:
        return None
    for before, after in reversed(list(pairwise(curve))):
        if before["heldout"] > loss:
            share = (before["heldout"] - loss) / (before["heldout"] - after["heldout"])
            return before["items"] + share * (after["items"] - before["items"])
    return float(curve[0]["items"])


def summary(rows: Rows) -> dict[str, Any]:
    """Return how many seeds reach their from-scratch loss, and what is saved, by workload and method.

    Savings are shares of the from-scratch run, seed by seed: `items` of its tokens (images), `with_source` of
    its tokens when the source's are counted too, `seconds_with_source` of its CPU seconds likewise. A step of
    the large model takes the median over all its runs in FP32: they compute the same.
    """
    return {workload: _of(own) for workload, own in _by_workload(rows).items()}


def _by_workload(rows: Rows) -> dict[str, list[Row]]:
    return grouped([{**row, "workload": row["setting"]["workload"]} for row in rows], "workload")


def _of(rows: Rows) -> dict[str, Any]:
    step_s, source_step_s = (
        statistics.median(row["step_cpu_s"] for row in rows if row["start"] not in left_out)
        for left_out in (("source", "plan"), set(_SAYS) - {"source"})
    )
    runs = {(row["method"], row["seed"]): row for row in rows}
    found: dict[str, Any] = {"step_cpu_s": step_s, "source_step_cpu_s": source_step_s, "methods": {}}
    for name, own in grouped((row for row in rows if row["start"] != "source"), "method").items():
        each = [
            _saved(row, runs["scratch", row["seed"]], runs["source", row["seed"]], source_step_s / step_s)
            for row in own
        ]
        found["methods"][name] = {
            "start": own[0]["start"], "ratio": own[0]["ratio"], "seeds": len(own),
            "reached": sum(one["items"] is not None for one in each),
            **{key: _spread([one[key] for one in each]) for key in each[0]},
        }  # fmt: skip
    return found


def _saved(row: Row, scratch: Row, source: Row, source_step: float) -> dict[str, float | None]:
    """Compare one run with the from-scratch run of its seed: what it saves, where it begins and ends.

    `first` is held-out loss above the source's, `final` above the target; a step of the source takes
    `source_step` of one of the large model. Under a plan: the loss that the lower class has above FP32.
    """
    target, whole = (scratch["curve"][-1][key] for key in ("heldout", "items"))
    before = source["curve"][-1]
    # All of the from-scratch run is what it is compared with, also where its loss was there sooner.
    needed = whole if row is scratch else reached(row["curve"], target)
    of_source = 0.0 if row is scratch else before["items"]
    found = {
        "first": row["curve"][0]["heldout"] - before["heldout"],
        "final": row["curve"][-1]["heldout"] - target,
    }
    costs = {"items": 0.0, "with_source": of_source, "seconds_with_source": of_source * source_step}
    for key, cost in costs.items():
        found[key] = None if needed is None else 1.0 - (needed + cost) / whole
    if "first_under_plan" in row:
        for key, at in (("first", 0), ("final", -1)):
            found[f"gap_{key}"] = row[f"{key}_under_plan"][HALF] - row["curve"][at]["heldout"]
    return found


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return mean, least and most; None unless every seed has one."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": statistics.fmean(known), "least": min(known), "most": max(known)}


def says(method: Mapping[str, Any]) -> str:
    """Return a method in words."""
    share = "" if method["ratio"] == 1.0 else f", {method['ratio']:.0%} of the steps"
    return _SAYS[method["start"]] + share


def cells(method: Mapping[str, Any]) -> list[str]:
    """Return a method's line of the table; savings are means over seeds, with the least and the most."""
    losses, savings = [f"{method[key]['mean']:+.3f}" for key in ("first", "final")], []
    for key in ("items", "with_source", "seconds_with_source"):
        found = method[key]
        savings.append(f"{found['mean']:.0%} ({found['least']:.0%} to {found['most']:.0%})" if found else "-")
    if method["start"] == "plan":
        savings[-1] = "-"  # one process computes both ranks, so its seconds are nobody's
    if method["start"] == "scratch":
        losses[0], savings = "-", ["-"] * 3
    return [says(method), *losses, f"{method['reached']} of {method['seeds']}", *savings]


def bars(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens or images that the expanded model saves beside the share to be saved."""
    return [
        bar(f"{workload}, {name}: share saved", of["items"] and of["items"]["mean"], BAR, at_least=True)
        for workload, found_of in found.items() for name, of in found_of["methods"].items()
        if of["start"] == "expanded"
    ]  # fmt: skip


def table(found: Mapping[str, Any]) -> Table:
    """Return what every method saves."""
    rows = [[workload, *cells(method)] for workload, of in found.items() for method in of["methods"].values()]
    headings = (
        "workload", "", "loss at step 0, above the source's", "final loss, above from scratch",
        "seeds that reach it", "tokens or images saved", "with the source's",
        "CPU seconds saved, with the source's",
    )  # fmt: skip
    return table_of("Growing (measured; the plan's weak class is emulated)", headings, rows, left=2)


def picture(rows: Rows, path: str | Path) -> Path:
    """Draw held-out loss over the large model's tokens, and over CPU seconds with the source's before.

    A line is the mean over seeds, its band from the least to the most; the dashed line is where the
    from-scratch run ends.
    """
    workloads = _by_workload(rows)
    title = "A grown model's held-out loss (measured; the plan's weak class is emulated)"
    figure = new_figure(10, 3.6 * len(workloads) + 0.7, title)
    panels = figure.subplots(len(workloads), 2, squeeze=False, sharey="row")
    for (workload, own), (left, right) in zip(workloads.items(), panels, strict=True):
        _panel(left, own, workload)
        _panel(right, [row for row in own if row["start"] != "plan"], workload, seconds=True)
    legend_below(figure, panels.flat, ncols=4)
    return save_png(figure, path, dpi=120)


def _panel(axes: Axes, rows: Rows, workload: str, seconds: bool = False) -> None:
    source_s = statistics.fmean(_seconds(row)[-1] for row in rows if row["start"] == "source")
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    for own in grouped(rows, "method").values():
        start = own[0]["start"]
        if start == "source" and not seconds:
            continue
        xs, first = [point["items"] for point in own[0]["curve"]], start in ("source", "scratch")
        if seconds:
            begins = 0.0 if first else source_s
            xs = [begins + statistics.fmean(at) for at in zip(*map(_seconds, own), strict=True)]
        losses = list(zip(*([point["heldout"] for point in row["curve"]] for row in own), strict=True))
        line = "-" if first else ("-", "--", ":", "-.")[(ratios.index(own[0]["ratio"]) - 1) % 4]
        mean, low, high = ([of(at) for at in losses] for of in (statistics.fmean, min, max))
        axes.plot(xs, mean, line, color=_COLOURS[start], linewidth=1.3, label=says(own[0]))
        axes.fill_between(xs, low, high, color=_COLOURS[start], alpha=0.12, linewidth=0)
    scratch = [row["curve"] for row in rows if row["start"] == "scratch"]
    target = statistics.fmean(curve[-1]["heldout"] for curve in scratch)
    axes.axhline(target, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    # The first tenth of a from-scratch run is steep, and hides what is compared.
    top = statistics.fmean(curve[max(1, len(curve) // 6)]["heldout"] for curve in scratch)
    bottom = min(point["heldout"] for row in rows for point in row["curve"])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 0.6M tokens
    items = f"{'tokens' if workload == 'gpt' else 'images'}, of the large model"
    x, y = ("CPU seconds, the source's included", "") if seconds else (items, f"{workload}: held-out loss")
    axes_of(axes, x=x, y=y, ylim=(bottom - 0.05 * (top - bottom), top))


def _seconds(row: Row) -> list[float]:
    return [point["step"] * row["step_cpu_s"] for point in row["curve"]]

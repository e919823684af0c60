"""The picture of compare_kernels.py: every variant's speed against FP32, by shape, and the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qsync import Precision
from qsync.experiments.harness import milliseconds
from qsync.experiments.harness.pictures import legend_below, new_figure
from qsync.figures.style import FAINT, INK, PRECISION_COLOURS, save_png, strip_axes


def _lighter(colour: str) -> tuple[float, ...]:
    """Half way to white. Not transparent: the grid would show through."""
    return tuple((1 + part) / 2 for part in to_rgb(colour))


# Ours are filled in the precision's colour; peers are grey to white, hatched by what they are (Inductor,
# torchao).
_OURS = {
    str(precision): precision
    for precision in (
        Precision.TF32, Precision.BF16, Precision.FP16, Precision.INT8, Precision.INT8_ALL, Precision.FP8,
    )
}  # fmt: skip
# In the order in which they are drawn.
_STYLES: dict[str, dict[str, Any]] = {
    **{
        f"{name}{suffix}": {"facecolor": _lighter(colour) if suffix else colour}
        for name, colour in ((name, PRECISION_COLOURS[precision]) for name, precision in _OURS.items())
        for suffix in ("", " contiguous", " + weight", " bf16 out")
    },
    "fp32 contiguous": {"facecolor": "#f4f5f7", "edgecolor": FAINT},
    "fp32 onednn": {"facecolor": "#d5dae0"},
    "autocast": {"facecolor": "#8a9099"},
    "inductor fp32": {"facecolor": "#f4f5f7", "edgecolor": FAINT, "hatch": "////"},
    "inductor bf16": {"facecolor": "#c3c8cf", "edgecolor": "#6b7178", "hatch": "////"},
    "torchao int8": {"facecolor": "#ffffff", "edgecolor": FAINT, "hatch": "...."},
    "torchao int8, inductor": {"facecolor": "#e3e6ea", "edgecolor": "#6b7178", "hatch": "xxxx"},
    "torchao float8, inductor": {"facecolor": "#ffffff", "edgecolor": "#cc79a7", "hatch": "xxxx"},
}
_ROOFLINE: dict[str, Any] = {"color": INK, "marker": "v", "markersize": 5, "markerfacecolor": "white"}
_PANELS = {
    "linear forward": "Linear, forward", "linear training": "Linear, forward and backward",
    "conv forward": "Convolution, forward", "conv training": "Convolution, forward and backward",
    "attention forward": "Attention, forward", "attention training": "Attention, forward and backward",
    "bert": "Whole step", "resnet": "Whole step",
}  # fmt: skip


def draw(content: Mapping[str, Any], path: str | Path) -> Path:
    """Draw the cases of kernels.json: a panel per section, a group per shape, and a rule where a bar lies."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for case in content["cases"]:
        if case["section"] in _PANELS:
            panels.setdefault(_PANELS[case["section"]], []).append(case)
    about, on_gpu = content["machine"], content["device"].startswith("cuda")
    where = ", ".join(about["gpus"][:1]) if on_gpu else f"{about['processor']}, one thread"
    title = f"Times as fast as FP32 eager (measured, {where})"
    figure = new_figure(13, 1.3 + 2.75 * max(len(panels), 1), title)
    shown: set[str] = set()
    for place, (title, cases) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, place + 1)
        shown |= _draw_panel(axes, title, cases, content["rows"])
    handles: list[Any] = [Patch(**_style(name), label=name) for name in _STYLES if name in shown]
    handles.append(Line2D([], [], color=INK, linewidth=2, label="bar"))
    handles.append(Line2D([], [], **_ROOFLINE, linewidth=0, label="roofline"))
    legend_below(figure, handles)
    return save_png(figure, path, dpi=130)


def _draw_panel(
    axes: Axes, title: str, cases: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> set[str]:
    """Draw one group of columns per case; return the names of the variants drawn."""
    names, position, ticks, top = set(), 0.0, [], 1.0
    for case in cases:
        mine = [name for name in _STYLES if name in case["variants"]]
        at = (case["section"], case["shape"], "fp32")
        limits = {r["variant"]: r["bar"] for r in rows if (r["section"], r["shape"], r["against"]) == at}
        for offset, name in enumerate(mine):
            top = max(top, _draw_column(axes, position + offset, case, name, limits.get(name)))
        baseline_s = case["variants"][case["baseline"]]["median_s"]
        label = f"{case['shape']}\nFP32 {milliseconds(baseline_s)}"
        ticks.append((position + (len(mine) - 1) / 2, label))
        position += len(mine) + 1.4
        names |= set(mine)
    axes.axhline(1.0, color=FAINT, linewidth=1, zorder=1)
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks])
    axes.set_xlim(-1.0, position - 1.4)
    axes.set_ylim(0, top * 1.13)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_ylabel("x FP32", color=INK, fontsize=9)
    strip_axes(axes, "y")
    return names


def _draw_column(axes: Axes, x: float, case: Mapping[str, Any], name: str, limit: float | None) -> float:
    """Draw one column with its spread, figure, bar and roofline; return how high it reaches."""
    entry = case["variants"][name]
    speed, (low, _, high) = entry["speedup"], entry["speedup_quartiles"]
    axes.bar(x, speed, width=0.86, linewidth=0.6, zorder=2, **_style(name))
    axes.plot([x, x], [low, high], color=INK, linewidth=1, zorder=4)
    reach, bound = float(max(speed, high)), 0.0
    if limit is not None:
        axes.hlines(limit, x - 0.46, x + 0.46, color=INK, linewidth=2, zorder=5)
        reach = max(reach, limit)
    if entry["least_s"]:
        bound = case["variants"][case["baseline"]]["median_s"] / entry["least_s"]
        axes.plot(x, bound, **_ROOFLINE, zorder=5)
    axes.annotate(
        f"{speed:.2f}", (x, 0), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=7, color=INK,
        zorder=6,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )  # fmt: skip
    return max(reach, bound)


def _style(name: str) -> dict[str, Any]:
    return {"edgecolor": "white", **_STYLES[name]}

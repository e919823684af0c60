"""Bars, table and picture of step times over paced links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from qsync.experiments.harness import Bar, bar, table_of
from qsync.experiments.links.rank import FP32, OURS, TORCH, WAYS
from qsync.figures.style import INK, SERIES_COLOURS, remove_frame, save_png
from qsync.records.compression import AUTO

_TICKS_S = [base * 10.0**power for power in range(-3, 2) for base in (1, 2, 3, 5)]
AS_FAST = 1.02  # limit of auto's step over the fastest way's
_WIRE_OVERHEAD = 1.1  # limit of bytes on the interface over the formula's: headers, packets sent again
Found = Mapping[str, Mapping[str, Any]]  # by gigabits per second


def step_s(found: Mapping[str, Any], way: str) -> float:
    """Return a way's median step."""
    return float(median(found["seconds"][way]))


def over(found: Mapping[str, Any], way: str, other: str) -> float:
    """Return a way's step over another's: the median of ratios within rounds."""
    pairs = zip(found["seconds"][way], found["seconds"][other], strict=True)
    return float(median(a / b for a, b in pairs))


def bars(found: Found) -> list[Bar]:
    """Return the promises: auto is as fast as the fastest at no more error, and bytes are the formula's."""
    made = []
    for rate, one in found.items():
        others = [way for way in WAYS if way != AUTO and way in one["seconds"]]
        fastest = min(others, key=lambda way: step_s(one, way))
        made.append(bar(f"{rate} Gb/s: step of auto / of the fastest other ({fastest})",
                        over(one, AUTO, fastest), AS_FAST))  # fmt: skip
        as_fast = [way for way in others if step_s(one, way) <= AS_FAST * step_s(one, AUTO)]
        least = min((one["errors"][way] for way in as_fast), default=None)
        if least is not None:
            made.append(bar(f"{rate} Gb/s: error of auto no more than of those as fast",
                            one["errors"][AUTO] <= least * (1.0 + 1e-6), True))  # fmt: skip
        counted = {way: median(one["sent_bytes"][way]) / one["formula_bytes"][way] for way in OURS}
        made.append(bar(f"{rate} Gb/s: bytes on the interface / formula, worst kind",
                        float(max(counted.values())), _WIRE_OVERHEAD))  # fmt: skip
    return made


def table(found: Found) -> Table:
    """Return a table of steps, what they are to FP32's, bytes, and errors of one step."""
    rates = list(found)
    rows = []
    for way in WAYS:
        cells = [way]
        for one in found.values():
            cells.append(f"{1e3 * step_s(one, way):.0f} ms ({over(one, way, FP32):.2f})")
        last = found[rates[-1]]
        cells.append(f"{median(last['sent_bytes'][way]) / 2**20:.2f}")
        cells.append(f"{last['errors'][way] / last['squared_norm']:.1e}")
        rows.append(cells)
    title = "Step (over FP32's in the same rounds) by bandwidth; bytes and error at the least; measured"
    headings = ("", *(f"{rate} Gb/s" for rate in rates), "MiB a step", "error of one step, |g|^2")
    return table_of(title, headings, rows)


def choices(found: Found) -> Table:
    """Return a table of what auto chose at each bandwidth, and the step that it predicted."""
    rows = []
    for rate, one in found.items():
        chosen = ", ".join(f"{kind}: {num}" for kind, num in one["chosen"].items()) or "all in fp32"
        predicted = "-" if one["predicted_s"] is None else f"{1e3 * one['predicted_s']:.0f} ms"
        rows.append(
            [f"{rate} Gb/s", chosen, predicted, f"{1e3 * step_s(one, AUTO):.0f} ms", f"{one['load']:.1f}"]
        )
    headings = ("", "parameters by kind", "predicted step", "measured step", "load of the machine")
    return table_of("What auto chose", headings, rows)


def draw(found: Found, path: Path) -> Path:
    """Draw step time against bandwidth, a line for each way."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rates = sorted(found, key=float)
    styles = {FP32: "-", TORCH: "--", AUTO: "-"}
    for way, colour in zip(WAYS, SERIES_COLOURS, strict=False):
        is_auto = way == AUTO
        axes.plot(
            [float(rate) for rate in rates], [step_s(found[rate], way) for rate in rates],
            styles.get(way, ":"), marker="o", color=INK if is_auto else colour, label=way,
            linewidth=2.4 if is_auto else 1.6, zorder=3 if is_auto else 2,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="bandwidth between the hosts, Gb/s", ylabel="step, s")
    axes.set_xticks([float(rate) for rate in rates], labels=rates)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [s for s in _TICKS_S if low <= s <= high]
    axes.set_yticks(ticks, labels=[f"{s:g}" for s in ticks])
    remove_frame(axes)
    axes.legend(frameon=False, fontsize=8)
    return save_png(figure, path)

"""Report plans for little memory: tables, bars and the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync.experiments.harness import Bar, bar, milliseconds, table_of
from qsync.experiments.harness.ranks import FAST, WEAK
from qsync.experiments.small_memory.ranks import JOINT, WAYS

Found = Mapping[str, Mapping[str, Any]]
NOTE = (
    "\n![Predicted step by the weak rank's memory, for every way to fit](../figures/small_memory.png)\n\n"
    "gloo, one thread a rank."
)
_GAP = 1.01  # to which fastest starts with levers are known
UNFITTED = "budgets that another way fits and the joint plan does not"
SLOWER = "predicted step of the joint plan over the least of every other way, worst"
OVER = "measured peaks above their budget"
PEAK_ERROR = "|predicted / measured - 1| of peaks, worst"
STEP_ERROR = "|predicted / measured - 1| of steps, median"


def bars(found: Found) -> list[Bar]:
    """Return the promises of predicted steps and measured peaks."""
    unfitted, ratios = [], [0.0]
    for name, one in found.items():
        for part in one["parts"]:
            steps = {way: _of(one, way, part) for way in WAYS}
            others = [row["predicted_s"] for way, row in steps.items() if row and way != JOINT]
            joint = steps[JOINT]
            if joint is None:
                unfitted += [f"{name} at {part:.0%}"] if others else []
            elif others:
                ratios.append(joint["predicted_s"] / min(others))
    peaks = [(title, own) for title, row in measured(found) for own in _peaks(row)]
    over = [title for title, (_, held, budget) in peaks if held > budget]
    errors = [abs(predicted / held - 1) for _, (predicted, held, _) in peaks]
    late = [abs(row["predicted_s"] / row["step_s"] - 1) for _, row in measured(found)]
    return [
        bar(UNFITTED, len(unfitted), 0, which=unfitted),
        bar(SLOWER, max(ratios), _GAP),
        bar(PEAK_ERROR, max(errors, default=None), 0.05),
        bar(OVER, len(over), 0, which=over),
        bar(STEP_ERROR, statistics.median(late) if late else None, 0.05),
    ]


def table(found: Found) -> Table:
    """Return every way's predicted step over FP32's without a limit, and added variance, by budget."""
    parts = list(dict.fromkeys(part for one in found.values() for part in one["parts"]))
    rows = [
        [name, way, *(_cell(one, _of(one, way, part)) for part in parts)]
        for name, one in found.items()
        for way in WAYS
    ]
    own = [number for number, row in enumerate(rows) if row[1] == JOINT]
    about = "Predicted step over FP32's (added variance), by the weak rank's memory over FP32's peak"
    return table_of(about, ("", "", *(f"{part:.0%}" for part in parts)), rows, left=2, bold=own)


def trained_table(title: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return plans that trained on two ranks: the weak rank's levers, steps, and both ranks' peaks in MiB."""
    headings = ("", "weak rank", "step, predicted", "measured", "peaks, predicted", "measured", "budgets")
    return table_of(f"{title} (measured; the weak rank is emulated; MiB)", headings, [
        [
            name, _levers(row), *_steps(row),
            *(" / ".join(map(_mebibytes, each)) for each in zip(*_peaks(row), strict=True)),
        ]
        for name, row in rows
    ], left=2)  # fmt: skip


def draw(found: Found, path: Path) -> None:
    """Draw every way's predicted step over FP32's by the weak rank's memory, a panel per model."""
    from matplotlib.figure import Figure  # slow to import

    from qsync.figures.style import SERIES_COLOURS, save_png, strip_axes

    figure = Figure(figsize=(3.3 * len(found), 3.8), layout="constrained")
    figure.suptitle("Step by the weak rank's memory (simulated from profiles)", x=0.01, ha="left")
    panels = figure.subplots(1, len(found), sharex=True, squeeze=False)[0]
    for axes, (name, one) in zip(panels, found.items(), strict=True):
        for way, colour in zip(WAYS, SERIES_COLOURS, strict=False):
            points = [(part, row) for part in one["parts"] if (row := _of(one, way, part))]
            axes.plot(
                [100 * part for part, _ in points], [row["predicted_s"] / one["step_s"] for _, row in points],
                label=way, color=colour, linewidth=2.4 if way == JOINT else 1.3, marker="o", markersize=4,
            )  # fmt: skip
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("memory, % of FP32's peak", fontsize=9)
        strip_axes(axes, grid="y")
    panels[0].invert_xaxis()
    panels[0].set_ylabel("step, x FP32's without a limit", fontsize=9)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    save_png(figure, path)


def _of(one: Mapping[str, Any], way: str, part: float) -> Mapping[str, Any] | None:
    row: Mapping[str, Any] | None = one["plans"].get(f"{way} at {part:g}")
    return row


def _cell(one: Mapping[str, Any], row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    variance = f" ({row['added_variance']:.0e})" if row["added_variance"] else ""
    return f"{row['predicted_s'] / one['step_s']:.2f}x{variance}"


def measured(found: Found) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (title, figures with measurements) of every measured joint plan."""
    for name, one in found.items():
        for title, found_there in one["measured"].items():
            part = float(title.removeprefix(f"{JOINT} at "))
            yield f"{name} at {part:.0%}", {**one["plans"][title], **found_there}


def _peaks(row: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """Yield (predicted, measured, budget) bytes of each rank, the strong one first."""
    budgets = [row["budgets"].get(name, math.inf) for name in (FAST, WEAK)]
    return zip(row["predicted_bytes"], row["peak_bytes"], budgets, strict=True)


def _steps(row: Mapping[str, Any]) -> tuple[str, str]:
    predicted_s, step_s = row["predicted_s"], row["step_s"]
    return f"{milliseconds(predicted_s)} ({predicted_s / step_s - 1:+.1%})", milliseconds(step_s)


def _levers(row: Mapping[str, Any]) -> str:
    _, _, levers = row["levers"].get(WEAK, "").partition(", ")  # the first part says how many samples
    less = f"{row['saving_less']} save less" if row["saving_less"] else ""
    return ", ".join(part for part in (f"{row['lowered']} lowered", less, levers) if part)


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}" if num_bytes < math.inf else "-"

"""Bars, tables and the picture of the suite, from what was measured of each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from qsync import Precision
from qsync.experiments.harness import Bar, bar, milliseconds, table_of
from qsync.experiments.harness.pairing import quartiles
from qsync.experiments.harness.pictures import DASHED, axes_of, legend_below, new_figure
from qsync.experiments.unseen.family_runs import AUTOCAST, FP32, MODES
from qsync.experiments.workloads.families import FAMILIES, HELD_OUT, TRANSFORMER
from qsync.figures.style import PRECISION_COLOURS, save_png
from qsync.replayer.step_noise import percentile

# Times as fast as torch.autocast; INT8 is promised of transformers, INT8 in all products of two nets as well.
BF16_BAR, INT8_BARS = 0.99, {"int8": 1.1, "int8_all": 1.2}
CONVOLUTION_BARS = {name: {"int8_all": 1.2} for name in ("resnet50", "convnext")}
# Limits of |error| of a predicted step over FP32's.
PREDICTION_BARS = {"median": 0.02, "95th percentile": 0.05, "worst": 0.08}
MEMORY_BAR = 0.05  # of |error| of a predicted peak
# Family -> part ("speed", "peers", "prediction", "memory") -> what was measured.
Found = Mapping[str, Mapping[str, Any]]


def bars(found: Found) -> list[Bar]:
    """Return every promise beside its measurement; a mode that failed has no measurement, and fails."""
    made = []
    for name, parts in found.items():
        if "speed" in parts:
            of_int8 = INT8_BARS if FAMILIES[name].kind == TRANSFORMER else CONVOLUTION_BARS.get(name, {})
            limits = {"bf16": BF16_BAR, **of_int8}
            variants = parts["speed"]["variants"]
            for mode, limit in limits.items():
                low, speed, high = times_as_fast(variants, mode)
                spread = {"quartiles": [low, high]}
                made.append(bar(f"{name}: {mode}, x autocast", speed, limit, at_least=True, **spread))
    alone = [error for parts in found.values() for error in _errors(parts)]
    together = [error for parts in found.values() for error in parts.get("ranks", {}).get("errors", ())]
    for where, errors in (("", alone), (" on two ranks", together)):
        for which, limit in PREDICTION_BARS.items() if errors else ():
            name = f"|predicted / measured - 1| of plans{where}, {which}"
            made.append(bar(name, _sizes(errors)[which], limit))
    if peaks := [abs(_memory_error(entry)) for entry in _peaks(found)]:
        made.append(bar("|predicted / measured - 1| of memory peaks, worst", max(peaks), MEMORY_BAR))
    made.append(bar("families with a failure", sum(bool(failures(parts)) for parts in found.values()), 0))
    return made


def times_as_fast(variants: Mapping[str, Any], of: str, against: str = AUTOCAST) -> list[float]:
    """Return the quartiles of how many times as fast a variant is, round by round; zero where it failed."""
    if of not in variants or against not in variants:
        return [0.0] * 3
    pairs = zip(variants[against]["seconds"], variants[of]["seconds"], strict=True)
    return quartiles([slower / faster for slower, faster in pairs])


def failures(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return what failed of a family -> why; peers that do not run are no failure."""
    runs = parts.get("prediction", {})
    failed = {
        part: found["failed"]
        for part, found in (
            ("profile", runs),
            ("memory", parts.get("memory", {})),
            ("ranks", parts.get("ranks", {})),
        )
        if "failed" in found
    }
    failed |= {
        f"plan {k}": run["failed"] for k, run in enumerate(runs.get("measured", ())) if "failed" in run
    }
    speed = parts.get("speed", {"unavailable": {}})
    return failed | {mode: why for mode, why in speed["unavailable"].items() if mode in (FP32, *MODES)}


def _errors(parts: Mapping[str, Any], of_fp32: bool = False) -> list[float]:
    """Return the signed errors of the plans' predicted ratios to FP32, or that of FP32's own: drift."""
    found = parts.get("prediction", {})
    predicted_s = found.get("predicted_s", [])
    pairs = list(zip(predicted_s, found.get("measured", ()), strict=True))
    chosen = pairs[:1] if of_fp32 else pairs[1:]
    return [seconds / predicted_s[0] / run["ratio"] - 1 for seconds, run in chosen if "ratio" in run]


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    found = (median(sizes), percentile(sizes, 0.95), max(sizes))
    return dict(zip(PREDICTION_BARS, found, strict=True))


def tables(found: Found, suffix: str = "") -> list[Table]:
    """Return the tables of speeds, peers, coverage, prediction, memory and failures that have rows."""
    rows: dict[str, list[list[str]]] = {title: [] for title in _HEADINGS}
    for name, parts in found.items():
        if "speed" in parts:
            rows[_SPEEDS].append([name, *_speed_cells(parts["speed"])])
            rows[_COVERAGE].append([name, *_coverage_cells(parts["speed"])])
        if "peers" in parts:
            variants, missing = parts["peers"]["variants"], parts["peers"]["unavailable"]
            cells = [f"{of} {times_as_fast(variants, of, FP32)[1]:.2f}" for of in variants if of != FP32]
            rows[_PEERS].append([name, ", ".join(cells), "; ".join(f"{k}: {v}" for k, v in missing.items())])
        if errors := _errors(parts):
            sizes = [f"{size:.1%}" for size in _sizes(errors).values()]
            drift = "".join(f"{error:+.1%}" for error in _errors(parts, of_fp32=True))
            rows[_PREDICTION].append([name, str(len(errors)), *sizes, drift])
        if errors := parts.get("ranks", {}).get("errors", []):
            inside = [one for one in parts["ranks"]["inside"] if one is not None]
            sizes = [f"{size:.1%}" for size in _sizes(errors).values()]
            rows[_ON_RANKS].append([name, str(len(errors)), *sizes, f"{sum(inside)} of {len(inside)}"])
        if FP32 in parts.get("memory", {}):
            rows[_MEMORY].append([name, *map(_memory_cell, parts["memory"].values())])
        rows[_FAILURES] += [[name, what, why] for what, why in failures(parts).items()]
    return [
        table_of(title + suffix, _HEADINGS[title], cells, left=3 if title in (_PEERS, _FAILURES) else 1)
        for title, cells in rows.items()
        if cells
    ]


_SPEEDS = "Whole steps, times as fast as FP32 eager (roofline) and as autocast (quartiles); measured"
_PEERS = "Other peers, times as fast as FP32 eager (measured)"
_COVERAGE = "FLOPs of products that each mode runs in which precision"
_PREDICTION = "|predicted / measured - 1| of a plan's step over FP32's (predictions are simulated)"
_ON_RANKS = "|predicted / measured - 1| of a plan's step on two ranks (predictions are simulated)"
_MEMORY = "Memory peak of a step, MiB measured, and predicted / measured - 1 (predictions are simulated)"
_FAILURES = "What failed"
_HEADINGS: dict[str, tuple[str, ...]] = {
    _SPEEDS: ("", "FP32", AUTOCAST, *MODES, *(f"{mode} / autocast" for mode in MODES)),
    _PEERS: ("", "", "not run"),
    _COVERAGE: ("", "segments", *MODES),
    _PREDICTION: ("", "plans", *PREDICTION_BARS, "FP32's own"),
    _ON_RANKS: ("", "plans", *PREDICTION_BARS, "in the interval"),
    _MEMORY: ("", FP32, *MODES),
    _FAILURES: ("", "", ""),
}


def _speed_cells(speed: Mapping[str, Any]) -> list[str]:
    variants = speed["variants"]
    fp32_s = median(variants[FP32]["seconds"])
    cells, over = [milliseconds(fp32_s)], []
    for of in (AUTOCAST, *MODES):
        entry = variants.get(of)
        bound = f" ({fp32_s / entry['least_s']:.1f})" if entry and entry["least_s"] else ""
        cells.append(f"{times_as_fast(variants, of, FP32)[1]:.2f}{bound}")
        low, middle, high = times_as_fast(variants, of)
        over.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
    return cells + over[1:]


def _coverage_cells(speed: Mapping[str, Any]) -> list[str]:
    cells = []
    for mode in MODES:
        flops = speed["coverage"].get(mode, {"flops": {}})["flops"]
        parts = sorted(flops.items(), key=lambda of: -of[1])
        cells.append(", ".join(f"{part:.0%} {precision}" for precision, part in parts) or "-")
    return [str(speed["segments"]), *cells]


def _peaks(found: Found) -> list[Mapping[str, int]]:
    """Return the memory entries of all families and modes."""
    measured = (parts.get("memory", {}) for parts in found.values())
    return [entry for by_mode in measured if FP32 in by_mode for entry in by_mode.values()]


def _memory_error(entry: Mapping[str, int]) -> float:
    return entry["predicted_peak_bytes"] / entry["peak_bytes"] - 1


def _memory_cell(entry: Mapping[str, int]) -> str:
    return f"{entry['peak_bytes'] / 2**20:.0f} ({_memory_error(entry):+.1%})"


def draw(content: Mapping[str, Any], path: Path) -> Path:
    """Draw every family's speed in FP32 and in each mode, as parts of torch.autocast's."""
    speeds = {
        f"{name} (held out)" if name in HELD_OUT else name: parts["speed"]["variants"]
        for part in ("families", "held_out") for name, parts in content[part].items() if "speed" in parts
    }  # fmt: skip
    title = f"Times as fast as torch.autocast BF16 (measured, {content['machine']['processor']}, one thread)"
    figure = new_figure(8, 1.6 + 0.42 * len(speeds), title)
    axes = figure.subplots()
    shown = (FP32, *MODES)
    for k, mode in enumerate(shown):
        heights = [position + 0.8 * ((k + 0.5) / len(shown) - 0.5) for position in range(len(speeds))]
        widths = [times_as_fast(variants, mode)[1] for variants in speeds.values()]
        colour = PRECISION_COLOURS[Precision(mode)]
        axes.barh(heights, widths, height=0.7 / len(shown), color=colour, label=mode)
    axes.axvline(1.0, **DASHED, label=AUTOCAST)
    axes.set_yticks(range(len(speeds)), list(speeds))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes_of(axes, x="x autocast")
    legend_below(figure, [axes])
    return save_png(figure, path)

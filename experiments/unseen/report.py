"""Bars and the table of the suite, from what was measured of each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from qsync.experiments.harness import Bar, bar, milliseconds, table_of
from qsync.experiments.harness.pairing import quartiles
from qsync.experiments.unseen.family_runs import AUTOCAST, EAGER, MODES
from qsync.experiments.workloads.families import FAMILIES, TRANSFORMER
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
    return failed | {mode: why for mode, why in speed["unavailable"].items() if mode in (EAGER, *MODES)}


def _errors(parts: Mapping[str, Any]) -> list[float]:
    """Return the signed errors of the plans' predicted ratios to FP32; the first plan is FP32 itself."""
    found = parts.get("prediction", {})
    predicted_s = found.get("predicted_s", [])
    pairs = list(zip(predicted_s, found.get("measured", ()), strict=True))
    return [seconds / predicted_s[0] / run["ratio"] - 1 for seconds, run in pairs[1:] if "ratio" in run]


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    found = (median(sizes), percentile(sizes, 0.95), max(sizes))
    return dict(zip(PREDICTION_BARS, found, strict=True))


def table(found: Found, suffix: str = "") -> Table:
    """Return the speed of every family, in eager FP32 and in each mode."""
    title = "Whole steps, times as fast as FP32 eager and as autocast (quartiles); measured"
    headings = ("", EAGER, AUTOCAST, *MODES, *(f"{mode} / autocast" for mode in MODES))
    rows = [[name, *_speed_cells(parts["speed"])] for name, parts in found.items() if "speed" in parts]
    return table_of(title + suffix, headings, rows)


def _speed_cells(speed: Mapping[str, Any]) -> list[str]:
    variants = speed["variants"]
    cells, over = [milliseconds(median(variants[EAGER]["seconds"]))], []
    for of in (AUTOCAST, *MODES):
        cells.append(f"{times_as_fast(variants, of, EAGER)[1]:.2f}")
        low, middle, high = times_as_fast(variants, of)
        over.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
    return cells + over[1:]


def _peaks(found: Found) -> list[Mapping[str, int]]:
    """Return the memory entries of all families and modes."""
    measured = (parts.get("memory", {}) for parts in found.values())
    return [entry for by_mode in measured if MODES[0] in by_mode for entry in by_mode.values()]


def _memory_error(entry: Mapping[str, int]) -> float:
    return entry["predicted_peak_bytes"] / entry["peak_bytes"] - 1

"""Bars and table of the suite, from each family's measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from qsync.experiments.harness import Bar, bar, milliseconds, table_of
from qsync.experiments.harness.pairing import quartiles
from qsync.experiments.unseen.family_runs import ALL_MODES, AUTOCAST, BASE, COMPILED, EAGER, GRAPHS
from qsync.experiments.workloads.families import LARGE, TRANSFORMER, family_named
from qsync.replayer.step_noise import percentile

# Speeds relative to torch.autocast: INT8's bars hold for transformers, those of INT8 in all products also for
# two nets, both on CPUs.
BF16_BAR, INT8_BARS = 0.99, {"int8": 1.1, "int8_all": 1.2}
CONVOLUTION_BARS = {name: {"int8_all": 1.2} for name in ("resnet50", "convnext")}
# Limits of |error| of a predicted step.
PREDICTION_BARS = {"median": 0.02, "95th percentile": 0.05, "worst": 0.08}
MEMORY_BAR = 0.05  # limit of |error| of a predicted peak
# A planned step in CUDA graphs beside the same step without them, where steps wait for launches.
GRAPHS_BARS = {"bert_base_8": 1.3}
# Family -> part ("speed", "prediction", "ranks", "memory") -> measurements.
Found = Mapping[str, Mapping[str, Any]]


def all_bars(seen: Found, held_out: Found) -> list[Bar]:
    """Return the bars of both kinds of families; those of held-out ones say so."""
    apart = bars(held_out) if held_out else []
    own = bars(seen) if seen else []
    return [*own, *({**one, "name": f"{one['name']} (held out)"} for one in apart)]


def bars(found: Found) -> list[Bar]:
    """Return every bar with its measurement; a failed mode has no measurement, and fails."""
    made = []
    for name, parts in found.items():
        if "speed" in parts:
            variants = parts["speed"]["variants"]
            of_int8 = CONVOLUTION_BARS.get(name, {})
            if family_named(name).kind == TRANSFORMER and name not in LARGE:
                of_int8 = INT8_BARS
            limits = {"bf16": BF16_BAR, BASE: BF16_BAR, **of_int8}
            for mode, limit in limits.items():
                low, speed, high = times_as_fast(variants, mode)
                spread = {"quartiles": [low, high]}
                made.append(bar(f"{name}: {mode}, x autocast", speed, limit, at_least=True, **spread))
        if "compiled" in parts and name in GRAPHS_BARS:
            low, speed, high = times_as_fast(
                parts["compiled"].get("variants", {}), f"bf16 in {GRAPHS}", "bf16"
            )
            what = f"{name}: bf16 in {GRAPHS}, x without"
            made.append(bar(what, speed, GRAPHS_BARS[name], at_least=True, quartiles=[low, high]))
    for part, where in (("prediction", ""), ("ranks", " on two ranks")):
        errors = [error for parts in found.values() for error in parts.get(part, {}).get("errors", ())]
        for which, limit in PREDICTION_BARS.items() if errors else ():
            name = f"|predicted / measured - 1| of plans{where}, {which}"
            made.append(bar(name, _sizes(errors)[which], limit))
    if peaks := [abs(_memory_error(entry)) for entry in _peaks(found)]:
        made.append(bar("|predicted / measured - 1| of memory peaks, worst", max(peaks), MEMORY_BAR))
    made.append(bar("families with a failure", sum(bool(failures(parts)) for parts in found.values()), 0))
    return made


def times_as_fast(variants: Mapping[str, Any], of: str, against: str = AUTOCAST) -> list[float]:
    """Return quartiles of a variant's relative speed over rounds; zero if it failed."""
    if of not in variants or against not in variants:
        return [0.0] * 3
    pairs = zip(variants[against]["seconds"], variants[of]["seconds"], strict=True)
    return quartiles([slower / faster for slower, faster in pairs])


def failures(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return a family's failures -> reasons; failures of torch.autocast do not count."""
    failed = {part: of["failed"] for part, of in parts.items() if "failed" in of}
    speed = parts.get("speed", {"unavailable": {}})
    return failed | {mode: why for mode, why in speed["unavailable"].items() if mode in (EAGER, *ALL_MODES)}


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    found = (median(sizes), percentile(sizes, 0.95), max(sizes))
    return dict(zip(PREDICTION_BARS, found, strict=True))


def tables(seen: Found, held_out: Found) -> list[Table]:
    """Return a table of every family's speed, and one of its compiled steps, as far as they were measured.

    It has eager FP32's step, and each variant beside autocast's.
    """
    names = {name: name for name in seen} | {name: f"{name} (held out)" for name in held_out}
    found, made = {**seen, **held_out}, []
    kinds = {"speed": ("Whole steps", ALL_MODES), "compiled": ("Whole steps under torch.compile", COMPILED)}
    for part, (what, variants) in kinds.items():
        timed = {shown: found[name][part]["variants"] for name, shown in names.items()
                 if "variants" in found[name].get(part, {})}  # fmt: skip
        shown = [one for one in variants if any(one in of for of in timed.values())]
        title = f"{what}: times as fast as torch.autocast, autocast as FP32 eager (quartiles); measured"
        rows = [[name, *_speed_cells(of, shown)] for name, of in timed.items()]
        if rows:
            made.append(table_of(title, ("", EAGER, AUTOCAST, *shown), rows))
    return made


def _speed_cells(variants: Mapping[str, Any], modes: Sequence[str]) -> list[str]:
    speeds = (times_as_fast(variants, AUTOCAST, EAGER), *(times_as_fast(variants, mode) for mode in modes))
    ratios = [f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in speeds]
    return [milliseconds(median(variants[EAGER]["seconds"])), *ratios]


def _peaks(found: Found) -> list[Mapping[str, int]]:
    """Return the memory entries of all families and modes."""
    measured = (parts.get("memory", {}) for parts in found.values())
    return [entry for by_mode in measured if "fp32" in by_mode for entry in by_mode.values()]


def _memory_error(entry: Mapping[str, int]) -> float:
    return entry["predicted_peak_bytes"] / entry["peak_bytes"] - 1

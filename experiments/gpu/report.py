"""Tables and bars of what was measured on a GPU; of a piece without a result the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from qsync.backend.devices.gpu_state import why_held_down
from qsync.experiments.harness import Bar, bar, milliseconds, table_of
from qsync.experiments.unseen.family_runs import AUTOCAST
from qsync.experiments.unseen.report import times_as_fast

Pieces = Mapping[str, Mapping[str, Any]]
_MEDIAN, _WORST, _MEMORY = 0.02, 0.08, 0.05
_NOT_MEASURED = (0.0, None)  # seconds, times as fast
_WITHOUT = ("not_run", "cut", "failed")


def bars(pieces: Pieces) -> list[Bar]:
    """Return the promises; those of pieces without a result are open."""
    tests = _tests(pieces)
    failed = sum(len(result["failed"]) for result in tests)
    are_all = tests and all("result" in found for key, found in pieces.items() if key.startswith("tests "))
    errors = sorted(abs(error) for _, result in _of(pieces, "prediction") for error in _errors(result))
    memory = [
        abs(one["predicted_peak_bytes"] / one["peak_bytes"] - 1)
        for _, result in _of(pieces, "memory")
        for one in result.values()
        if isinstance(one, Mapping)
    ]
    rates = [
        (name.split()[0], mode, ratio)
        for name, result in _of(pieces, "steps")
        for mode, (_, ratio) in {
            **dict.fromkeys(result["unavailable"], _NOT_MEASURED),
            **_speeds(result),
        }.items()
        if mode == "bf16"
    ]
    return [
        bar("tests that fail on the GPU", failed if failed or are_all else None, 0),
        bar("|predicted / measured - 1| of plans, median", median(errors) if errors else None, _MEDIAN),
        bar("|predicted / measured - 1| of plans, worst", max(errors, default=None), _WORST),
        bar("|predicted / measured - 1| of peak memory, worst", max(memory, default=None), _MEMORY),
        *(
            bar(f"{name}: {mode}, x autocast", ratio, 0.99, at_least=True) for name, mode, ratio in rates
        ),
    ]  # fmt: skip


def held_down(pieces: Pieces) -> list[str]:
    """Return the pieces during which a GPU's clock was held down, and by what."""
    return [
        f"{key}: the clock of {state['name']} was held down by {why}"
        for key, found in pieces.items()
        for state in found.get("gpus_after", ())
        if (why := why_held_down(state))
    ]


def cards(pieces: Pieces) -> str:
    """Say on which GPUs the pieces were measured; nothing if that is not known."""
    found = [result for name, result in _of(pieces, "environment") if name == "machine"]
    names = [f"{gpu['name']} (driver {gpu['driver_version']})" for one in found for gpu in one["gpus"]]
    return f"{', '.join(names)}; NCCL {found[0]['nccl']}." if names else ""


def tables(pieces: Pieces, doubts: Sequence[str] = ()) -> list[Table]:
    """Return the tables: each piece, doubts, tests that failed, steps, predictions, memory, ranks."""
    every = [[key, _state(found)] for key, found in pieces.items()]
    failed = [[name, why] for result in _tests(pieces) for name, why in result["failed"].items()]
    kernels = [
        [f"{case['section']} {case['shape']}", name, why]
        for _, result in _of(pieces, "kernels")
        for case in result["cases"]
        for name, why in case.get("failed", {}).items()
    ]
    runs = [*_of(pieces, "steps"), *((f"{name}, compiled", one) for name, one in _of(pieces, "compiled"))]
    chosen = [
        [kernel["kind"], kernel["precision"], kernel["kernel"], f"{1e3 * kernel['measured_s']:.2f} ms",
         f"{kernel['speedup']:.2f}"]
        for name, result in _of(pieces, "environment") if name == "doctor"
        for device in result["devices"] if device["device"] != "cpu"
        for kernel in device["kernels"] if kernel["kernel"]
    ]  # fmt: skip
    steps = [
        [name, variant, milliseconds(seconds), "-" if ratio is None else f"{ratio:.2f}",
         _mebibytes(result["variants"][variant].get("peak_bytes"))]
        for name, result in runs
        for variant, (seconds, ratio) in _speeds(result).items()
    ]  # fmt: skip
    missing = [
        [name, variant, why] for name, result in runs for variant, why in result["unavailable"].items()
    ]
    errors = [
        [name, "  ".join(f"{100 * error:+.1f} %" for error in _errors(result)) or "-"]
        for name, result in _of(pieces, "prediction")
    ]
    memory = [
        [name, mode, _mebibytes(one["peak_bytes"]),
         f"{100 * (one['predicted_peak_bytes'] / one['peak_bytes'] - 1):+.1f} %"]
        for name, result in _of(pieces, "memory") for mode, one in result.items() if isinstance(one, Mapping)
    ]  # fmt: skip
    ranks = [
        [
            name,
            milliseconds(step_s),
            milliseconds(result["predicted_s"] or 0.0),
            f"{step_s / median(result['alone_s']):.2f}",
        ]
        for name, result in _of(pieces, "ranks")
        for step_s in [median(result["seconds"])]
    ]
    links = [
        [name, f"{1e6 * link['latency_s']:.0f} µs", f"{link['bytes_per_s'] / 1e9:.2f} GB/s",
         f"{link['overlap_rate']:.2f}", f"{1e6 * 2**20 * result['toll_s_per_byte']:.1f} µs"]
        for name, result in _of(pieces, "collectives") if (link := result.get("link"))
    ]  # fmt: skip
    made = (
        table_of("Pieces", ("", "result"), every, left=2),
        table_of("Doubts", ("",), [[doubt] for doubt in doubts], left=1),
        table_of("Tests that failed", ("test", "why"), failed, left=2),
        table_of("Kernels that failed", ("layer", "variant", "why"), kernels, left=3),
        table_of(
            "Kernels that qsync doctor chooses, forward and backward",
            ("kind", "precision", "kernel", "time", "x FP32"),
            chosen,
            left=3,
        ),
        table_of(
            "Whole steps",
            ("model", "variant", "step", "x autocast", "peak beyond what stays"),
            steps,
            left=2,
        ),
        table_of("Whole steps that do not run", ("model", "variant", "why"), missing, left=3),
        table_of("Predicted / measured - 1 of plans, against FP32", ("model", "plans"), errors, left=2),
        table_of("Peak memory of a step", ("model", "mode", "measured", "predicted"), memory, left=2),
        table_of("Two ranks", ("", "measured", "predicted", "x limit: rank 0 alone"), ranks),
        table_of(
            "All-reduces of two ranks",
            ("", "latency", "rate", "rate beside compute, of alone", "compute lost a MiB"),
            links,
        ),
    )
    return [table for table in made if table.row_count]


def _tests(pieces: Pieces) -> list[Mapping[str, Any]]:
    """Return the counts of every file of tests, of one that was cut until then."""
    found = [found for key, found in pieces.items() if key.startswith("tests ")]
    return [
        one["result"] if "result" in one else one["partial"]
        for one in found
        if {"result", "partial"} & set(one)
    ]


def _of(pieces: Pieces, group: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the result of every piece of a group that has one."""
    for key, found in pieces.items():
        name = key.removeprefix(f"{group} ")
        if name != key and "result" in found:
            yield name, found["result"]


def _state(found: Mapping[str, Any]) -> str:
    """Say of a piece what came of it."""
    if "result" not in found:
        why_not = next(f"{why.replace('_', ' ')}: {found[why]}" for why in _WITHOUT if why in found)
        return f"{why_not}; until then {_counts(found['partial'])}" if "partial" in found else why_not
    result, took = found["result"], f"{found['seconds']:.0f} s"
    if set(result) == {"passed", "skipped", "failed"}:
        return f"{_counts(result)}, {took}"
    held = [one["holds"] for one in result.get("bars", ())]
    return f"{sum(map(bool, held))} of {len(held)} bars hold, {took}" if held else took


def _counts(tests: Mapping[str, Any]) -> str:
    return f"{tests['passed']} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed"


def _mebibytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"


def _errors(result: Mapping[str, Any]) -> Sequence[float]:
    """Return the signed errors of the plans' predicted ratios to FP32; the first plan is FP32 itself."""
    predicted, own = result["predicted_s"], result["measured"]
    return [
        one / predicted[0] / found["ratio"] - 1
        for one, found in list(zip(predicted, own, strict=True))[1:]
        if "ratio" in found
    ]


def _speeds(result: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return of every variant its seconds, and how many times as fast as autocast it is, if that ran."""
    variants = result["variants"]
    return {
        name: (median(one["seconds"]), times_as_fast(variants, name)[1] if AUTOCAST in variants else None)
        for name, one in variants.items()
    }

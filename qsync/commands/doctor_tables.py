"""Tables and lines of `qsync doctor`, from the results of device_report."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from qsync.operators.precision import Precision

_ORDER = {str(precision): number for number, precision in enumerate(Precision)}


def summary(found: dict[str, Any]) -> list[str]:
    """Return the report's first lines: versions, processor, GPUs, notes."""
    host = found["machine"]
    gpus, collectives = (", ".join(names) or "none" for names in (host["gpus"], found["collectives"]))
    lines = [
        f"qsync {found['qsync']}, torch {host['torch']}, Python {host['python']}",
        f"{host['processor']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB; "
        f"GPUs: {gpus}; collectives: {collectives}",
    ]
    return lines + [f"note: {text}" for text in found["notes"]]


def kernels_table(device: dict[str, Any]) -> Table:
    """Return a table of products and precisions for which the device has a kernel."""
    carried = f"; carries {device['narrow']} along edges" if device["narrow"] else ""
    shown = Table(
        title=f"{device['device']}: class {device['device_class']}{carried}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    numbers = ("x FP32", "GFLOP/s", "of peak")
    for heading in ("product", "precision", "kernel", *numbers, ""):
        shown.add_column(heading, justify="right" if heading in numbers else "left")
    last = None
    for row in device["kernels"]:
        if row["kernel"] is None:
            continue
        kind = row["kind"] if row["kind"] != last else ""
        rate, share = row["flops_per_s"], row["share_of_peak"]
        shown.add_row(
            kind, row["precision"], row["kernel"], f"{row['speedup']:.2f}",
            "-" if rate is None else _giga(rate), "-" if share is None else f"{share:.0%}",
            "slower" if row["speedup"] < 1 else "",
        )  # fmt: skip
        last = row["kind"]
    return shown


def remarks(device: dict[str, Any]) -> list[str]:
    """Return explanations of the table, the peaks and compiled libraries, a paragraph each."""
    threads = "" if device["device"].startswith("cuda") else ", one thread"
    half = (device["narrow"] or "fp16").upper()
    peaks = ", ".join(f"{name} {_giga(rate)}" for name, rate in device["peak_flops_per_s"].items())
    return [
        f"Forward and backward of one call, casts included (measured{threads}). GFLOP/s count its products, "
        "2 operations per multiply-add, INT8's too. The reference is never chosen: it decodes to FP32.",
        f"Peaks, GFLOP/s of a large product of each type (measured{threads}): {peaks}; of int8, which "
        f"multiplies backward in {half}: 3 / (1 / int8 + 2 / {half.lower()}), of attention, where "
        f"the scores alone are in INT8: 6 / (1 / int8 + 5 / {half.lower()}).",
        "Stays in FP32 whatever is asked, and `qsync explain` names it: what the model has in another type, "
        "writes in place or asks a type for; attention under data as a float mask; a convolution without a "
        "batch; a value times itself; addmm with alpha or beta; an embedding with max_norm or sparse.",
        *device["build"],
    ]


def reasons_table(device: dict[str, Any]) -> Table:
    """Return a table of reasons for missing or rejected kernels."""
    shown = Table(
        title=f"{device['device']}: why there is no kernel, or not another one",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("precisions", "products", "why"):
        shown.add_column(heading)
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in device["kernels"]:
        for reason in [row["note"]] if row["kernel"] is None else passed_over(row):
            kinds.setdefault((row["precision"], reason), []).append(row["kind"])
    for limit in device["limits"]:
        reason = f"not all of them: {limit['why']}; those stay in the next precision up"
        kinds.setdefault((limit["precision"], reason), []).append(limit["kind"])
    num_kinds = len({row["kind"] for row in device["kernels"]})
    rows: dict[tuple[str, str], list[str]] = {}  # (products, reason) -> precisions
    for (lacking, reason), products in sorted(kinds.items(), key=lambda item: _ORDER[item[0][0]]):
        named = "all" if len(products) == num_kinds else ", ".join(products)
        rows.setdefault((named, reason), []).append(lacking)
    for (named, reason), precisions in rows.items():
        shown.add_row(", ".join(precisions), named, reason)
    return shown


def build_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of compiled libraries: device, seconds, or the reason of a failure."""
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("library", "for", "seconds", ""):
        shown.add_column(heading, justify="right" if heading == "seconds" else "left")
    for row in rows:
        shown.add_row(row["library"], row["device"], f"{row['seconds']:.1f}", row.get("why_not", ""))
    return shown


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.1f}" if rate < 1e10 else f"{rate / 1e9:,.0f}"


def passed_over(row: dict[str, Any]) -> list[str]:
    """Return why each other kernel was rejected; the reference is never a candidate."""
    return [f"not {name}: {why}" for name, why in row["rejected"].items() if name != "reference"]

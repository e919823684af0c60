"""What `qsync doctor` finds: devices, versions, and the kernel chosen for each product, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

import qsync
from qsync import backend
from qsync.backend import cutlass, kernel_cache
from qsync.backend.absent_kernels import why_absent
from qsync.backend.candidates import candidates
from qsync.backend.casts import library
from qsync.backend.cutlass.products import architecture as architecture_of
from qsync.backend.device_detection import detect_class, machine
from qsync.backend.device_peaks import measured_peaks, peak_of
from qsync.records.kernel_support import LIMITS
from qsync.records.precision import PRECISIONS_BY_KIND, Precision

# The versions of torch that qsync is tested with, both ends included.
_WANTED_TORCH = ((2, 11), (2, 13))
_SLOWER = "slower than FP32 here"


def examine() -> dict[str, Any]:
    """Everything doctor reports, as JSON. Times every kernel on a small shape: seconds per device.

    >>> examine()["devices"][0]["kernels"][0]["kernel"]
    'torch'
    """
    host = machine()
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return {
        "qsync": qsync.__version__,
        "machine": host,
        "collectives": [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()],
        "notes": notes(),
        "measured": True,
        "devices": [describe(device) for device in devices],
    }


def describe(device: torch.device) -> dict[str, Any]:
    """One device: its class, its precisions, its peaks and its kernels, measured with one thread."""
    kernels = backend.select(device)
    found = detect_class(device)
    with _one_thread():
        rows = kernels.describe()
        peaks = measured_peaks(device)
    chosen = {(row["kind"], row["precision"]): row for row in rows}
    narrow = kernels.narrow or "fp16"
    return {
        "device": str(device),
        "device_class": found.name,
        "memory_bytes": found.memory_bytes,
        "precisions": [str(p) for p in found.precisions],
        "narrow": kernels.narrow,
        "measured_threads": 1,
        "peak_flops_per_s": peaks,
        "build": build_state(device),
        "limits": [
            {"kind": kind, "precision": str(precision), "why": why}
            for kind, precision, why in LIMITS[device.type]
        ],
        "kernels": [
            _rated(chosen[kind, str(p)], peak_of(kind, p, narrow, peaks), device)
            if (kind, str(p)) in chosen
            else _absent(kind, p)
            for kind in PRECISIONS_BY_KIND
            for p in Precision
        ],
    }


def build_state(device: torch.device) -> list[str]:
    """What is compiled on the machine itself, and where, or why not: the casts, and CUTLASS of GPUs."""
    folder, on_gpu = kernel_cache.folder(), device.type == "cuda"
    architecture = architecture_of(device) if on_gpu else None
    place = f"sm_{architecture}" if on_gpu else machine()["processor"]
    casts = library.note(architecture) or f"casts: compiled for {place}, cached in {folder}"
    return [casts, f"CUTLASS products: {cutlass.state(device)}"] if on_gpu else [casts]


def notes() -> list[str]:
    """What will not work here, each in one sentence."""
    found = []
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = _WANTED_TORCH
    if not low <= version <= high:
        found.append(
            f"torch {torch.__version__} was not tested; use {low[0]}.{low[1]} to {high[0]}.{high[1]}"
        )
    if not torch.cuda.is_available():
        found.append("torch sees no CUDA device: every rank here is a CPU rank")
    return found


def summary(found: dict[str, Any]) -> list[str]:
    """The first lines a person reads."""
    host = found["machine"]
    gpus, collectives = (", ".join(names) or "none" for names in (host["gpus"], found["collectives"]))
    lines = [
        f"qsync {found['qsync']}, torch {host['torch']}, Python {host['python']}",
        f"{host['processor']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB; "
        f"GPUs: {gpus}; collectives: {collectives}",
    ]
    return lines + [f"note: {text}" for text in found["notes"]]


def table(device: dict[str, Any]) -> Table:
    """The kernels of one device: one row per product and precision that it has one for."""
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
            _SLOWER if row["speedup"] < 1 else "",
        )  # fmt: skip
        last = row["kind"]
    return shown


def remarks(device: dict[str, Any]) -> list[str]:
    """How the table is to be read, the peaks, and what is compiled here: a paragraph each."""
    threads = "" if device["device"].startswith("cuda") else ", one thread"
    narrow = (device["narrow"] or "fp16").upper()
    peaks = ", ".join(f"{name} {_giga(rate)}" for name, rate in device["peak_flops_per_s"].items())
    return [
        f"Forward and backward of one call, casts included (measured{threads}). GFLOP/s count its products, "
        "2 operations per multiply-add, INT8's too. The reference is never chosen: it decodes to FP32.",
        f"Peaks, GFLOP/s of a large product of each type (measured{threads}): {peaks}; of int8, which "
        f"multiplies backward in {narrow}: 3 / (1 / int8 + 2 / {narrow.lower()}), of attention, where "
        f"the scores alone are in INT8: 6 / (1 / int8 + 5 / {narrow.lower()}).",
        "Stays in FP32 whatever is asked, and `qsync explain` names it: what the model has in another type, "
        "writes in place or asks a type for; attention under data as a float mask; a convolution without a "
        "batch; a value times itself; addmm with alpha or beta; an embedding with max_norm or sparse.",
        *device["build"],
    ]


def reasons(device: dict[str, Any]) -> Table:
    """Why one device has no kernel for a product, and why the others were not chosen: a row per reason."""
    shown = Table(
        title=f"{device['device']}: why there is no kernel, or not another one",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("precision", "products", "why"):
        shown.add_column(heading)
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in device["kernels"]:
        for reason in [row["note"]] if row["kernel"] is None else _passed_over(row):
            kinds.setdefault((row["precision"], reason), []).append(row["kind"])
    for limit in device["limits"]:
        reason = f"not all of them: {limit['why']}; those stay in the next precision up"
        kinds.setdefault((limit["precision"], reason), []).append(limit["kind"])
    num_kinds = len({row["kind"] for row in device["kernels"]})
    for precision in Precision:
        for (lacking, reason), products in kinds.items():
            if lacking == precision:
                shown.add_row(lacking, "all" if len(products) == num_kinds else ", ".join(products), reason)
    return shown


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.1f}" if rate < 1e10 else f"{rate / 1e9:,.0f}"


def _rated(row: dict[str, Any], peak: float | None, device: torch.device) -> dict[str, Any]:
    """The row with its rate and the share of the peak; None where nothing is multiplied, or no peak known."""
    row = {**row, "note": _note(row, device)}
    if row["kernel"] is None:
        return row
    rate = row["flops"] / row["measured_s"] or None
    share = rate / peak if rate and peak else None
    return {**row, "flops_per_s": rate, "peak_flops_per_s": peak, "share_of_peak": share}


def _absent(kind: str, precision: Precision) -> dict[str, Any]:
    reason = why_absent(kind, precision)
    return {"kind": kind, "precision": str(precision), "kernel": None, "why": reason, "note": reason}


def _note(row: dict[str, Any], device: torch.device) -> str | None:
    """Why there is no kernel, why the precision is not worth choosing, or which kernel was passed over."""
    if row["kernel"] is None:
        tried = candidates(row["kind"], Precision(row["precision"]), device)
        return "; ".join(c.reason for c in tried if c.reason) or row["why"]
    said = [] if row["speedup"] >= 1 else [_SLOWER]
    return "; ".join(said + _passed_over(row)) or None


def _passed_over(row: dict[str, Any]) -> list[str]:
    return [f"not {name}: {why}" for name, why in row["rejected"].items() if name != "reference"]


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread while kernels are timed: a rank that torchrun starts has one, unless told otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

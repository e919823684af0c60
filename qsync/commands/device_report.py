"""The report of `qsync doctor`: devices, versions, and the kernel chosen for each product, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync import backend
from qsync.backend import cutlass, kernel_cache
from qsync.backend.casts import compiled_casts
from qsync.backend.cuda_build import architecture as architecture_of
from qsync.backend.devices.device_detection import detect_class, machine, untested_torch
from qsync.backend.measure_peaks import measured_peaks, peak_of
from qsync.backend.precisions_that_pay import emulation_note
from qsync.backend.selection.kernel_candidates import candidates
from qsync.commands.doctor_tables import passed_over
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND, PRODUCTS, why_unwritten


def examine() -> dict[str, Any]:
    """Return the report of `qsync doctor` as JSON; time every kernel on a small shape (seconds per device).

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
    """Describe one device: its class, precisions, peaks and kernels, measured with one thread."""
    kernels = backend.select(device)
    found = detect_class(device)
    with one_thread():
        rows = kernels.describe()
        peaks = measured_peaks(device)
    chosen = {(row["kind"], row["precision"]): row for row in rows}
    half = kernels.sixteen_bit or "fp16"
    return {
        "device": str(device),
        "device_class": found.name,
        "memory_bytes": found.memory_bytes,
        "precisions": [str(p) for p in found.precisions],
        "narrow": kernels.sixteen_bit,
        "measured_threads": 1,
        "peak_flops_per_s": peaks,
        "build": build_state(device),
        "limits": limits(device.type),
        "kernels": [
            _rated(chosen[kind, str(p)], peak_of(kind, p, half, peaks), device)
            if (kind, str(p)) in chosen
            else _absent(kind, p)
            for kind in PRECISIONS_BY_KIND
            for p in Precision
        ],
    }


def limits(device: str) -> list[dict[str, str]]:
    """Return the shapes that the kernels of a kind of device ("cpu", "cuda") do not serve, with reasons."""
    return [
        {"kind": product.kind, "precision": str(limit.precision), "why": limit.reason}
        for product in PRODUCTS.values()
        for limit in product.limits
        if limit.device == device and limit.applies is not None
    ]


def build_state(device: torch.device) -> list[str]:
    """Return which casts and CUTLASS products are compiled on this machine, or why not."""
    folder, on_gpu = kernel_cache.folder(), device.type == "cuda"
    architecture = architecture_of(device) if on_gpu else None
    target = f"sm_{architecture}" if on_gpu else machine()["processor"]
    casts = compiled_casts.note(architecture) or f"casts: compiled for {target}, cached in {folder}"
    return [casts, f"CUTLASS products: {cutlass.state(device)}"] if on_gpu else [casts]


def notes() -> list[str]:
    """Return one sentence for each thing that will not work on this machine."""
    found = untested_torch()
    if not torch.cuda.is_available():
        found.append("torch sees no CUDA device: every rank here is a CPU rank")
    if note := emulation_note(torch.device("cpu")):
        found.append(note)
    return found


def _rated(row: dict[str, Any], peak: float | None, device: torch.device) -> dict[str, Any]:
    """Return a peak's row with its rate and its share of the peak; None if unknown."""
    row = {**row, "note": _note(row, device)}
    if row["kernel"] is None:
        return row
    rate = row["flops"] / row["measured_s"] or None
    share = rate / peak if rate and peak else None
    return {**row, "flops_per_s": rate, "peak_flops_per_s": peak, "share_of_peak": share}


def _absent(kind: str, precision: Precision) -> dict[str, Any]:
    reason = why_unwritten(kind, precision)
    return {"kind": kind, "precision": str(precision), "kernel": None, "why": reason, "note": reason}


def _note(row: dict[str, Any], device: torch.device) -> str | None:
    """Return why a product has no kernel, does not pay, or which other kernels were slower."""
    if row["kernel"] is None:
        tried = candidates(row["kind"], Precision(row["precision"]), device)
        return "; ".join(c.reason for c in tried if c.reason) or row["why"]
    slower = [] if row["speedup"] >= 1 else ["slower than FP32 here"]
    return "; ".join(slower + passed_over(row)) or None


@contextmanager
def one_thread() -> Iterator[None]:
    """Time kernels on one thread: torchrun gives a rank one, unless OMP_NUM_THREADS is set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

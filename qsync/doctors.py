"""What `qsync doctor` finds: devices, versions, and per device the kernel chosen for each product, with the reason."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import qsync
from qsync import backend
from qsync.devices import detect_class, machine
from qsync.errors import UnsupportedError

_WANTED_TORCH = ((2, 11), (2, 13))


def examine() -> dict[str, Any]:
    """Everything doctor reports, as JSON. Times every kernel on a small shape: about a second per device."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return {
        "qsync": qsync.__version__,
        "machine": machine(),
        "collectives": [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()],
        "warnings": warnings(),
        "devices": [describe(device) for device in devices],
    }


def describe(device: torch.device) -> dict[str, Any]:
    """One device: its class, its precisions, and its kernels."""
    kernels = backend.select(device)
    found = detect_class(device)
    return {
        "device": str(device),
        "device_class": found.name,
        "memory_bytes": found.memory_bytes,
        "precisions": [str(p) for p in found.precisions],
        "narrow": kernels.narrow,
        "kernels": kernels.describe(),
    }


def warnings() -> list[str]:
    """What will not work here, each in one sentence."""
    found = []
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = _WANTED_TORCH
    if not low <= version <= high:
        found.append(f"torch {torch.__version__} was not tested; use 2.{low[1]} to 2.{high[1]}")
    if not torch.cuda.is_available():
        found.append("torch sees no CUDA device: every rank here is a CPU rank")
    try:
        backend.select("cpu").choice("linear", "int8")
    except UnsupportedError as error:
        found.append(str(error))
    return found


def summary(found: dict[str, Any]) -> list[str]:
    """The first lines a person reads."""
    host = found["machine"]
    lines = [
        f"qsync {found['qsync']}, torch {host['torch']}, Python {host['python']}",
        f"{host['processor']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB; "
        f"GPUs: {', '.join(host['gpus']) or 'none'}; collectives: {', '.join(found['collectives'])}",
    ]
    return lines + [f"note: {text}" for text in found["warnings"]]


def table(device: dict[str, Any]) -> Table:
    """The kernels of one device. Speeds are a forward and backward pass, casts included, against FP32."""
    shown = Table(title=f"{device['device']}: {device['device_class']} (measured on one small shape)")
    for heading in ("product", "precision", "kernel", "x FP32", "why not the others"):
        shown.add_column(heading, justify="right" if heading == "x FP32" else "left")
    for row in device["kernels"]:
        rejected = "; ".join(f"{name}: {reason}" for name, reason in (row.get("rejected") or {}).items())
        speed = f"{row['speedup']:.2f}" if row["kernel"] else "-"
        shown.add_row(row["kind"], row["precision"], row["kernel"] or "none", speed, rejected or row["why"] or "")
    return shown

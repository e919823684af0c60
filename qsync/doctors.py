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
from qsync.backend.candidates import candidates
from qsync.devices import detect_class, machine
from qsync.precision import Precision

# The versions of torch that qsync is tested with, both ends included.
_WANTED_TORCH = ((2, 11), (2, 13))


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
    """One device: its class, its precisions, and its kernels, measured with one thread."""
    kernels = backend.select(device)
    found = detect_class(device)
    with _one_thread():
        rows = kernels.describe()
    return {
        "device": str(device),
        "device_class": found.name,
        "memory_bytes": found.memory_bytes,
        "precisions": [str(p) for p in found.precisions],
        "narrow": kernels.narrow,
        "measured_threads": 1,
        "kernels": [{**row, "note": _note(row, device)} for row in rows],
    }


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
    """The kernels of one device: one row per product and precision."""
    threads = "" if device["device"].startswith("cuda") else ", one thread"
    carried = f"; carries {device['narrow']} along edges" if device["narrow"] else ""
    shown = Table(
        title=f"{device['device']}: class {device['device_class']}{carried}",
        caption=f"Forward and backward on one small shape, casts included (measured{threads}).",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("product", "precision", "kernel", "x FP32", "why"):
        shown.add_column(heading, justify="right" if heading == "x FP32" else "left")
    last = None
    for row in device["kernels"]:
        speed = f"{row['speedup']:.2f}" if row["kernel"] else "-"
        kind = row["kind"] if row["kind"] != last else ""
        shown.add_row(kind, row["precision"], row["kernel"] or "none", speed, row["note"] or "")
        last = row["kind"]
    return shown


def _note(row: dict[str, Any], device: torch.device) -> str | None:
    """Why there is no kernel, why the precision is not worth choosing, or which kernel was passed over."""
    if row["kernel"] is None:
        tried = candidates(row["kind"], Precision(row["precision"]), device)
        return "; ".join(c.reason for c in tried if c.reason) or row["why"]
    said = [] if row["speedup"] >= 1 else ["slower than FP32 here"]
    said += [f"not {name}: {why}" for name, why in row["rejected"].items() if name != "reference"]
    return "; ".join(said) or None


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread while kernels are timed: a rank that torchrun starts has one, unless told otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

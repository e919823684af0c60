"""Detect a rank's device class, and describe the machine."""

from __future__ import annotations

import os
import platform
import re
import warnings
from functools import cache
from typing import Any

import torch

import qsync
from qsync import backend
from qsync.backend.devices.cpu_quota import cpu_quota
from qsync.backend.devices.processor import processor
from qsync.errors import FormatError, shortened
from qsync.records.cluster import DeviceClass
from qsync.records.profiles import processor_with

_WHOLE = 0.95  # of a core: a quota that leaves more counts as none
# The versions of torch that qsync is tested with, both ends included.
_TESTED_TORCH = ((2, 11), (2, 14))


def untested_torch() -> list[str]:
    """Return a sentence if this version of torch is untested with qsync, else an empty list."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = _TESTED_TORCH
    if low <= version <= high:
        return []
    tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return [f"torch {torch.__version__} was not tested with qsync; if something fails, use {tested}"]


@cache
def warn_of_untested_torch() -> None:
    """Warn, once per process and on one rank, if this version of torch is untested."""
    if os.environ.get("RANK", "0") == "0":
        for text in untested_torch():
            warnings.warn(text, stacklevel=2)


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the model's parameters; the CPU if it has none.

    Raises FormatError for something else than a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise FormatError(
            f"model must be a torch.nn.Module, found {shortened(model)}; pass the module itself"
        )
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def detect_class(
    device: torch.device, emulated_share: float | None = None, ranks_on_host: int = 1
) -> DeviceClass:
    """Return the device class of this rank, named so that equal devices share a class.

    On a CPU the number of threads is part of the class, and memory is the host's, divided by its ranks. A
    container's quota below one core per thread is part of the class, too. `emulated_share` is the share of a
    core that an emulated rank gets; for a rank of one thread such a quota is its share.
    """
    kernels, quota = backend.select(device), None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name = f"{processor()}-{torch.get_num_threads()}t"
        memory = _host_memory_bytes() // max(ranks_on_host, 1)
        quota = _quota_share(ranks_on_host) if emulated_share is None else None
        name += f"-quota-{quota:g}" if quota is not None else ""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if emulated_share is not None:
        slug += f"-emulated-{emulated_share:g}"
    elif torch.get_num_threads() == 1:  # several threads are timed by wall clock
        emulated_share = quota
    precisions, hardware = kernels.precisions(), hardware_of(device)
    return DeviceClass(slug, device.type, 1, memory, precisions, emulated_share, hardware=hardware)


def _quota_share(ranks_on_host: int) -> float | None:
    """Return the share of a core per thread that a container's quota leaves a rank; None if unlimited."""
    quota = cpu_quota()
    share = quota / (max(ranks_on_host, 1) * torch.get_num_threads()) if quota is not None else 1.0
    return round(share, 2) if share < _WHOLE else None


def hardware_of(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor with a rank's threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    return processor_with(processor(), torch.get_num_threads())


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe this machine for result files: processor, GPUs, threads, versions.

    With `device`, add the device's kind and name.
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        **({"device": device.type, "hardware": hardware_of(device)} if device is not None else {}),
        "qsync": qsync.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "memory_bytes": _host_memory_bytes(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Compile every library of this machine's devices ahead of a job, for `qsync doctor --build`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from qsync.backend import cuda_build
from qsync.backend.casts import compiled_casts
from qsync.errors import BuildError, QSyncError, shortened

# The oldest compute capability (times 10) that the kernels support: 7.0.
_OLDEST = 70


def architectures_here() -> list[str]:
    """Return the architectures of this machine's GPUs, such as "75" and "90", without repeats."""
    return sorted(
        {cuda_build.architecture(torch.device("cuda", card)) for card in range(torch.cuda.device_count())}
    )


def checked(architectures: Sequence[str]) -> list[str]:
    """Return architectures in nvcc's notation ("75"), from "75", "7.5" or "sm_75".

    Raises QSyncError for anything else.
    """
    return list(dict.fromkeys(map(_checked, architectures)))


def build(architectures: Sequence[str]) -> Iterator[dict[str, str | float]]:
    """Compile the casts for this processor, and casts and products for each GPU architecture.

    Yields for each library its name, the device ("cpu", "sm_75"), the seconds of its build (near 0 if
    cached), and `why_not`: a sentence if it cannot be built here, else None.
    """
    yield _built("casts", "cpu", compiled_casts.note)
    for architecture in architectures:
        device = f"sm_{architecture}"
        yield _built("casts", device, partial(compiled_casts.note, architecture))
        for family in cuda_build.families_of(architecture):
            yield _built(family, device, partial(_why_not, architecture, family))


def _built(library: str, device: str, make: Callable[[], str | None]) -> dict[str, str | float]:
    begun = time.perf_counter()
    why_not = make()
    found: dict[str, str | float] = {
        "library": library,
        "device": device,
        "seconds": time.perf_counter() - begun,
    }
    return found | ({"why_not": why_not} if why_not else {})


def _why_not(architecture: str, family: str) -> str | None:
    """Compile a family of products; return the reason if this machine cannot build it."""
    try:
        cuda_build.library(architecture, [family])
    except BuildError as error:
        return str(error)
    return None


def _checked(architecture: str) -> str:
    number = architecture.lower().removeprefix("sm_").replace(".", "")
    if not number.isdecimal() or not _OLDEST <= int(number) < 1000:
        raise QSyncError(
            f"{shortened(architecture)} is not a GPU architecture that qsync supports; give a compute "
            "capability of 7.0 or higher, such as 7.5"
        )
    return number

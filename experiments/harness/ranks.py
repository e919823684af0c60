"""One rank of the demo: its core, its device, its share."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch

from qsync.errors import QSyncError
from qsync.experiments.harness.emulation import Throttle, pin_to_core, throttled
from qsync.experiments.harness.freed_memory import keep_freed_memory

# On a machine with one kind of device, the rank that plays the inference device.
WEAK_RANK = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. `emulated_share` is the share of its core it gets, None if its speed is its own."""

    device: torch.device
    emulated_share: float | None
    throttle: Throttle | None


@contextlib.contextmanager
def placed(weak_share: float) -> Iterator[Place]:
    """Give this rank its device. Real differences are used where there are any; else the weak rank is
    emulated.

    Real: GPUs of different kinds (one rank each), or one kind of GPU with the second rank on the CPU.
    Emulated: each rank on one core, and the weak one paused and resumed so that it gets `weak_share` of it.
    """
    rank = int(os.environ["LOCAL_RANK"])
    kinds = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if kinds:
        different = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
        on_gpu = rank == 0 or different is not None
        device = torch.device("cuda", 0 if rank == 0 else different or 0) if on_gpu else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        yield Place(device, None, None)
        return
    pin_to_core(rank)
    torch.set_num_threads(1)
    keep_freed_memory()  # in every run alike: page faults would cost each a few per cent, and unevenly
    if rank == WEAK_RANK and weak_share < 1:
        with throttled(weak_share) as throttle:
            yield Place(torch.device("cpu"), weak_share, throttle)
        return
    yield Place(torch.device("cpu"), None, None)


def leave(command: str, error: QSyncError) -> NoReturn:
    """End this rank with exit code 2; rank 0 says why, and the others let it finish its sentence."""
    if int(os.environ["RANK"]) == 0:
        print(f"qsync {command}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # torchrun ends all ranks as soon as one is gone
    sys.exit(2)


def backend_of() -> str:
    """NCCL between GPUs; gloo as soon as one rank is on a CPU."""
    kinds = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return "nccl" if len(kinds) > 1 else "gloo"

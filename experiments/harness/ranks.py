"""One rank of an experiment: its device, its share of a core, its place in the job."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from qsync.distributed import job
from qsync.errors import QSyncError
from qsync.experiments.harness.emulation import Throttle, pin_to_core, throttled
from qsync.experiments.harness.freed_memory import keep_freed_memory

# Device classes of two unequal ranks, and the fast rank with the machine to itself.
FAST, WEAK, ALONE = "train", "infer", "alone"
# On a machine with one kind of device, the rank that plays the inference device.
WEAK_RANK = 1
BUCKET_CAP_MB = 8.0  # smaller than DDP's 25: less is left to reduce when the last gradient is ready
BUCKET_CAP_BYTES = int(BUCKET_CAP_MB * 2**20)
# A step waits for the rank that is late. Without a margin a plan whose ranks are predicted to arrive together
# took 5 % longer than predicted here, and a weak rank that was idle for a fifth of the step 1 %.
MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. `emulated_share` is the share of its core it gets, None if its speed is its own."""

    device: torch.device
    emulated_share: float | None
    throttle: Throttle | None

    def measured_share(self) -> float | None:
        """Return the share of its core that this rank really gets; None if its speed is its own."""
        return self.throttle.measured_share(2.0) if self.throttle else None


@contextlib.contextmanager
def placed(weak_share: float) -> Iterator[Place]:
    """Give this rank its device: a different one where the machine has any, else an emulated one.

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


def run_rank(
    command: str, work: Callable[[dict[str, Any], Place], None], *, timeout_s: float = 300.0
) -> None:
    """Run `work(configuration, place)` as one rank of a job; the configuration is the JSON in argv.

    A rank that fails with a QSyncError exits with code 2.
    """
    config: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.setdefault("QSYNC_BACKEND", backend_of())
    try:
        with placed(config.get("weak_share", 1.0)) as place:
            job.join_job(place.device, timeout_s=timeout_s)
            work(config, place)
    except QSyncError as error:
        leave(command, error)


def leave(command: str, error: QSyncError) -> NoReturn:
    """End this rank with exit code 2; rank 0 says why, and the others let it finish its sentence."""
    if int(os.environ["RANK"]) == 0:
        print(f"qsync {command}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # torchrun ends all ranks as soon as one is gone
    sys.exit(2)


def backend_of() -> str:
    """Return NCCL between GPUs, gloo as soon as one rank is on a CPU."""
    kinds = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return "nccl" if len(kinds) > 1 else "gloo"

"""Place the ranks of an experiment: devices, shares of cores, and processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir

from qsync import QSyncError
from qsync.backend.devices.emulation import Throttle, busy_share, pin_to_core, slowed_otherwise
from qsync.backend.devices.gpu_state import gpu_states
from qsync.distributed import job
from qsync.experiments.harness import one_gpu, processes
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.provenance import folder_of
from qsync.processes.child_processes import environment
from qsync.records.json_files import read_json, write_json

# Device classes of two unequal ranks, and of the fast rank with the machine to itself.
FAST, WEAK, ALONE = "train", "infer", "alone"
# The rank that emulates the inference device on a machine with one kind of device.
WEAK_RANK = 1
_GRACE_S = 1.0  # seconds that other ranks give rank 0 to print its error
BUCKET_CAP_MB = 8.0  # MB; smaller than DDP's 25, so less is left to reduce after the last gradient
BUCKET_CAP_BYTES = int(BUCKET_CAP_MB * 2**20)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's device, its throttle if emulated, and its class name if set.

    `gpu_share` is a rank's share of a GPU beside the strong rank's, if both have parts of one.
    """

    device: torch.device
    throttle: Throttle | None = None
    device_class: str | None = None
    gpu_share: float | None = None

    def measured_share(self) -> float | None:
        """Return the share of its core or GPU that this rank really gets; None if not emulated."""
        return busy_share(2.0) if self.throttle else self.gpu_share

    @contextlib.contextmanager
    def at_full_speed(self) -> Iterator[None]:
        """Pause no process inside: for tracing and compiling, which nothing measures."""
        if self.throttle is not None:
            self.throttle.__exit__()
        yield
        if self.throttle is not None:
            self.throttle.__enter__()


@contextlib.contextmanager
def placed(weak_share: float | None) -> Iterator[Place]:
    """Give this rank a device: of different kinds if the machine has them, else an emulated one.

    Real: GPUs of different kinds, one rank each. Emulated: all ranks on parts of one GPU; without a GPU each
    rank on one core, with the weak one paused to get `weak_share` of it. `weak_share` None means full CPU
    speed on every rank, on any core.
    """
    rank = int(os.environ["LOCAL_RANK"])
    kinds, name = gpus(), WEAK if rank == WEAK_RANK else FAST
    if weak_share is not None and kinds:
        different = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
        device = torch.device("cuda", 0 if rank == 0 else different)
        torch.cuda.set_device(device)
        is_weak_part = rank == WEAK_RANK and weak_share < 1 and one_gpu.PERCENTAGE in os.environ
        if is_weak_part:
            slowed_otherwise(weak_share)
        yield Place(device, device_class=name, gpu_share=weak_share if is_weak_part else None)
        return
    torch.set_num_threads(1)
    if weak_share is not None:
        pin_to_core(rank)
        keep_freed_memory()  # in every run: page faults would cost each some per cent, unevenly
    share = weak_share if weak_share and rank == WEAK_RANK else 1.0
    with Throttle(share) as throttle:
        yield Place(torch.device("cpu"), throttle if share < 1 else None, name)


def run_on_ranks(
    work: Callable[[dict[str, Any], Place], Any],
    config: Mapping[str, Any],
    *,
    command: str,
    num_ranks: int = 2,
    timeout_s: float = 300.0,
) -> Any:
    """Run `work(config, place)` on several ranks of this machine; return rank 0's result, as JSON.

    With a `weak_share` in the configuration the second rank is weak (see `placed`). Raises QSyncError for an
    invalid share or `out`, before anything starts, and if a rank fails.
    """
    share = config.get("weak_share", 1.0)
    if not 0 < share <= 1:
        raise QSyncError(f"--weak-share must be in (0, 1], found {share}; give e.g. 0.5 for half a core")
    if "out" in config:
        config = {**config, "out": str(folder_of(Path(config["out"]).absolute()))}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        result, parts, found = Path(folder) / "result.json", None, dict[str, str]()
        if num_ranks > 1 and "weak_share" in config and _is_one_gpu():
            parts, found = (
                one_gpu.percentages(share, num_ranks, WEAK_RANK),
                dict(stack.enter_context(one_gpu.served(folder))),
            )
        task = {
            "percentages": parts,
            "module": processes.module_of(work), "function": work.__name__, "config": config,
            "command": command, "timeout_s": timeout_s, "result": str(result),
        }  # fmt: skip
        started = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
            "--log-dir", folder, "--no-python", sys.executable, "-m", "qsync.experiments.harness.ranks",
            json.dumps(task),
        ]  # fmt: skip
        # One thread a rank: each has one core. Kineto would log every memory measurement on stderr. Files of
        # killed ranks are removed with this temporary folder; Inductor's cache stays.
        variables = environment(
            OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="5", TMPDIR=folder, TORCHINDUCTOR_CACHE_DIR=cache_dir(),
            **found,
        )  # fmt: skip
        code = _exit_code(started, variables)
        if code != 0:
            raise QSyncError(f"the ranks stopped with exit code {code}; the first message above says why")
        return read_json(result)["result"]


def _exit_code(command: list[str], variables: Mapping[str, str]) -> int:
    """Run torchrun; only this process gets an interruption, and ends torchrun and the ranks."""
    process = subprocess.Popen(
        command, env=variables, start_new_session=True, preexec_fn=processes.end_with_parent
    )
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Run one rank of `run_on_ranks`, with its task as JSON in argv; a QSyncError is exit code 2."""
    processes.end_with_parent("torch.distributed.run")
    task: dict[str, Any] = json.loads(sys.argv[1])
    share, is_first = task["config"].get("weak_share"), os.environ["RANK"] == "0"
    if task["percentages"]:  # before anything opens the GPU
        os.environ[one_gpu.PERCENTAGE] = str(task["percentages"][int(os.environ["LOCAL_RANK"])])
    # gloo if any rank is on a CPU
    os.environ.setdefault("QSYNC_BACKEND", "nccl" if share and len(set(gpus())) > 1 else "gloo")
    with ending_on_error(f"qsync {task['command']}"), placed(share) as place:
        job.join_job(place.device, timeout_s=task["timeout_s"])
        found = getattr(import_module(task["module"]), task["function"])(task["config"], place)
        if is_first:
            write_json(task["result"], {"result": found})


@contextlib.contextmanager
def ending_on_error(command: str) -> Iterator[None]:
    """Print a QSyncError of this rank as one sentence, and end the process with code 2.

    torchrun ends all ranks as soon as one exits, so the others let rank 0 print first.
    """
    try:
        yield
    except QSyncError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_GRACE_S)
        print(f"{command}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


@contextlib.contextmanager
def process_group_of_one() -> Iterator[None]:
    """Form a process group of this process alone, unless there is one: DDP without peers."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _is_one_gpu() -> bool:
    """Return whether this machine has GPUs, all of one kind; opens none."""
    return torch.cuda.is_available() and len({state["name"] for state in gpu_states()}) == 1


def gpus() -> list[str]:
    """Return the names of this machine's GPUs."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


if __name__ == "__main__":
    main()

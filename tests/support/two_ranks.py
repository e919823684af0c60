"""Scripts that real ranks run, and what each of them said."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import warm_rank
from torch.distributed import TCPStore

HEADER = """
import os, signal, sys, time
import torch, torch.distributed as dist
import torch.nn.functional as F
import qsync
from qsync.distributed import ddp_profiling
from qsync.errors import QSyncError

rank = int(os.environ["RANK"])
cache = os.environ["CACHE"]
ddp_profiling.PROFILE_S = 0.3  # a test that depends on times sets more

def say(text):
    os.write(1, f"[{rank}] {text}\\n".encode())

class Net(torch.nn.Module):
    def __init__(self, width=64, depth=2):
        super().__init__()
        self.inner = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x):
        return self.head(F.gelu(self.inner(x)))

def make(**options):
    torch.manual_seed(0)
    return Net(**options)

def batch(size=32, width=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, width, generator=generator), torch.arange(size) % 4

def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch(seed=10 * number + rank))
        loss.backward()
        optimizer.step()
    return loss

def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])

def attempt(what, **changes):
    arguments = {"model": make(), "example_batch": batch(), "loss_fn": loss_fn, "cache_dir": cache, **changes}
    try:
        qsync.hybrid(arguments.pop("model"), **arguments)
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {type(error).__name__}: {error}")
"""

# Ranks are forked from one process that has imported all of this: a rank is new, and starts at once.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(
    [
        "qsync.hybrid_training.hybrid_job",
        "qsync.runtime.wrapping",
        "torch._functorch.aot_autograd",
        "scipy.optimize",
        "rich.progress",
    ]
)
_TIMEOUT_S = 500.0
_READERS = ThreadPoolExecutor(32)


class Program:
    """A script that runs in a process of its own, forked from the warm one."""

    def __init__(self, script: Path, environment: Mapping[str, str], *arguments: str) -> None:
        pipe, end = _WARM.Pipe(duplex=False)
        self.process = _start(script, arguments, [end, end], environment)
        end.close()
        self._output = _READERS.submit(_read, pipe)

    def ended(self, timeout_s: float = _TIMEOUT_S) -> tuple[int | None, str]:
        """Return the exit code, None of one that did not end and is killed, and what it printed."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        self.kill()
        return code, self._output.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start_ranks(scripts: Sequence[Path | None], folder: Path, *arguments: str) -> dict[int, Program]:
    """Ranks of a job that no agent watches, each of its own script; one without a script never starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"WORLD_SIZE": str(len(scripts)), "LOCAL_WORLD_SIZE": str(len(scripts))}
    return {
        rank: Program(script, environment(folder, **place, RANK=str(rank), LOCAL_RANK=str(rank)), *arguments)
        for rank, script in enumerate(scripts)
        if script is not None
    }


def launch(tmp_path: Path, body: str, ranks: int = 2, timeout_s: float = _TIMEOUT_S) -> str:
    """What the ranks of this script print, each a process of its own, as torchrun starts them.

    A rank that fails ends the others. What is about torchrun itself starts torchrun.
    """
    script = tmp_path / "script.py"
    script.write_text(HEADER + body)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = environment(
        tmp_path, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    pipes = [_WARM.Pipe(duplex=False) for _ in ("stdout", "stderr")]
    jobs = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    ends = [end for _, end in pipes]
    processes: list[BaseProcess] = []
    try:
        processes += [_start(script, (), ends, job) for job in jobs]
        for end in ends:
            end.close()
        with ThreadPoolExecutor() as pool:
            readers = [pool.submit(_read, pipe) for pipe, _ in pipes]
            codes = _exit_codes(processes, timeout_s)
            printed, errors = (reader.result() for reader in readers)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert codes == [0] * ranks, f"exit codes {codes}:\n{errors[-8000:]}"
    return printed


def _start(
    script: Path, arguments: tuple[str, ...], ends: list[Connection], environment: Mapping[str, str]
) -> BaseProcess:
    """Start a process whose exit code one thread alone reads.

    Any other `start` polls all children that multiprocessing lists. An exit code can be read once, and who
    comes second notes 255.
    """
    process = _WARM.Process(target=warm_rank.run, args=(script, arguments, ends, environment))
    process.start()
    multiprocessing.process._children.discard(process)
    return process


def _read(pipe: Connection) -> str:
    with os.fdopen(os.dup(pipe.fileno()), encoding="utf-8", errors="replace") as file:
        return file.read()


def _exit_codes(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """Wait for all ranks, and where one fails for five seconds more: the others may say why they do."""
    ends, left = time.monotonic() + timeout_s, {process.sentinel: process for process in processes}
    while left and (done := wait(left, timeout=max(0.0, ends - time.monotonic()))):
        if any([left.pop(sentinel).exitcode for sentinel in done]):
            ends = min(ends, time.monotonic() + 5.0)
    for process in left.values():
        process.kill()
    return [process.exitcode for process in processes]


def environment(tmp_path, **more: str) -> dict[str, str]:
    return {**os.environ, "CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", **more}


def said(output: str, what: str) -> list[str]:
    """What each rank said of one thing, in rank order; before it on the line, others may have printed."""
    found = []
    for rank in (0, 1):
        start = f"[{rank}] {what}: "
        lines = [line.partition(start)[2] for line in output.splitlines() if start in line]
        assert len(lines) == 1, f"rank {rank} said {lines} of {what}:\n{output}"
        found += lines
    return found

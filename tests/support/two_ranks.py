"""Scripts that two real ranks run under torchrun, and what each of them said."""

from __future__ import annotations

import os
import subprocess
import sys

HEADER = """
import os, signal, sys, time
import torch, torch.distributed as dist
import torch.nn.functional as F
import qsync
from qsync.distributed import ddp_profiling
from qsync.errors import QSyncError

rank = int(os.environ["RANK"])
cache = os.environ["CACHE"]
ddp_profiling.PROFILE_S = 1.0  # a test that depends on times sets more

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

# Threads of gloo that still hold tensors abort an interpreter that ends before them (pytorch#179291). All
# that Python does at its end is done first; then the process ends without it.
ENDING = """
import atexit, threading
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def launch(tmp_path, body: str, *options: str, ranks: int = 2) -> str:
    """What the ranks of this script print under torchrun."""
    script = tmp_path / "script.py"
    script.write_text(HEADER + body + ENDING)
    command = [sys.executable, "-m", "torch.distributed.run", *(options or ["--standalone"])]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def environment(tmp_path, **more: str) -> dict[str, str]:
    return {**os.environ, "CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", **more}


def said(output: str, what: str) -> list[str]:
    """What each rank said of one thing, in rank order."""
    found = []
    for rank in (0, 1):
        start = f"[{rank}] {what}: "
        lines = [line.removeprefix(start) for line in output.splitlines() if line.startswith(start)]
        assert len(lines) == 1, f"rank {rank} said {lines} of {what}:\n{output}"
        found += lines
    return found

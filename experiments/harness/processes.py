"""Starting processes: the ranks of a job through torchrun, and a function in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qsync.errors import QSyncError


def start_ranks(module: str, config: Mapping[str, Any], num_ranks: int = 2, what: str = "the ranks") -> None:
    """Run `python -m module CONFIG` on so many ranks of this machine, one thread each, and wait for them.

    Raises QSyncError if a rank failed.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--no-python", sys.executable, "-m", module, json.dumps(config),
    ]  # fmt: skip
    # One thread a rank: each has one core. Kineto would announce every memory measurement on stderr.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "5"}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code != 0:
        raise QSyncError(f"{what} stopped with exit code {code}; the first message above says why")


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns, as JSON, in an interpreter of its own."""
    code = (
        f"import json, sys; from {function.__module__} import {function.__name__} as run; "
        "print(json.dumps(run(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_resident_bytes() -> int:
    """Return this process's own peak. getrusage's remembers the process that this one was started from."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024

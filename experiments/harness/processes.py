"""Run a function in a fresh interpreter; end processes together; read this process's peak memory."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsync.processes.child_processes import environment

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
# Last lines of a script that trains on gloo. Threads of gloo that hold tensors abort an ending interpreter
# (pytorch#179291): so run Python's exit handlers, then end the process.
END_BEFORE_GLOO = """
import atexit, os, sys, threading
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a fresh interpreter; return its result, as JSON."""
    code = (
        f"import json, sys; from {module_of(function)} import {function.__name__} as run; "
        "print(json.dumps(run(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return json.loads(done.stdout.splitlines()[-1])


def end_with_parent(parent: str = "") -> None:
    """Make the system kill this process when its parent dies.

    End now if the parent is already gone: if `parent` is not in its command line.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent.encode() not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        os._exit(0)


def module_of(function: Callable[..., Any]) -> str:
    """Return the name by which another process imports the function's module."""
    spec = sys.modules[function.__module__].__spec__
    return spec.name if spec else function.__module__


def peak_resident_bytes() -> int:
    """Return this process's own peak memory; getrusage's includes its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024

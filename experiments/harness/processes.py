"""A function in a fresh interpreter, processes that end together, and the peak memory of this process."""

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

from qsync.child_processes import environment

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
# The last lines of a script that trains on gloo. Threads of gloo that still hold tensors abort an interpreter
# that ends before them (pytorch#179291): all that Python does at its end is done, then the process ends.
END_BEFORE_GLOO = """
import atexit, os, sys, threading
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns, as JSON, in an interpreter of its own."""
    code = (
        f"import json, sys; from {module_of(function)} import {function.__name__} as run; "
        "print(json.dumps(run(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return json.loads(done.stdout.splitlines()[-1])


def end_with_parent(parent: str = "") -> None:
    """Let the system kill this process when the one that started it is gone, however that ended.

    Ends it now if that is gone already: if `parent` is no part of its command line.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent.encode() not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        os._exit(0)


def module_of(function: Callable[..., Any]) -> str:
    """Return the name by which another process imports the function's module."""
    spec = sys.modules[function.__module__].__spec__
    return spec.name if spec else function.__module__


def peak_resident_bytes() -> int:
    """Return this process's own peak. getrusage's remembers the process that this one was started from."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024

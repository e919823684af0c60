"""One rank of a client's job: starts the script, and notes when each line comes and what it takes.

torchrun ... --no-python python -m qsync.experiments.clients.observed_rank FOLDER SCRIPT ARGUMENTS

It imports nothing that takes time: it starts with every rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a living process, of children that it waited for, and of those that live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended since
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def _end_with_observer() -> None:
    """Let the system kill the script when its observer is gone; the harness's own imports torch."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Run the script, and write what was observed; end as it ended."""
    folder, script, *arguments = sys.argv[1:]
    command = [sys.executable, "-u", script, *arguments]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_observer)
    assert process.stdout is not None
    lines, first_cpu_s = [], None
    for line in process.stdout:
        lines.append((time.monotonic() - begun, line.rstrip("\n")))
        if first_cpu_s is None and line.startswith("step "):
            first_cpu_s = cpu_seconds(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    found = {
        "lines": lines, "end_s": time.monotonic() - begun, "exit_code": exit_code,
        "first_step_cpu_s": first_cpu_s, "cpu_s": usage.ru_utime + usage.ru_stime,
    }  # fmt: skip
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()

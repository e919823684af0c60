"""Start one rank of a client's job, and record the time of each line that it prints.

torchrun ... --no-python python -m qsync.experiments.clients.observed_rank FOLDER SCRIPT ARGUMENTS

It imports only fast modules, since it starts with every rank.
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


def _end_with_observer() -> None:
    """Make the system kill the script when its observer dies; the harness's version imports torch."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Run the script, write the observations, and exit with its code."""
    folder, script, *arguments = sys.argv[1:]
    command = [sys.executable, "-u", script, *arguments]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_observer)
    assert process.stdout is not None
    lines = [(time.monotonic() - begun, line.rstrip("\n")) for line in process.stdout]
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"lines": lines}))
    sys.exit(process.wait())


if __name__ == "__main__":
    main()

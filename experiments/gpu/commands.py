"""Run a command with a time limit: end its process group then, and keep its output."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED")
# Signals that end a command, each with the seconds until the next.
_GRACES_S = {signal.SIGTERM: 3.0, signal.SIGKILL: 3.0}


class Ended(NamedTuple):
    """The end of a command: its seconds, and why it has no result (None if it has one)."""

    seconds: float
    why_not: str | None
    cut: bool = False


def run_within(command: Sequence[str], most_s: float, log: Path) -> Ended:
    """Run a command with all output to `log`; end it and its children after `most_s` seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(most_s)
        except subprocess.TimeoutExpired:
            return Ended(time.monotonic() - begun, f"cut after {most_s:.0f} s", cut=True)
        finally:
            _end(process)
    seconds = time.monotonic() - begun
    return Ended(seconds, None if code == 0 else _reason(log, code))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its child processes: ranks, compilers."""
    for number, grace_s in _GRACES_S.items():
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end = time.monotonic() + grace_s
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
    process.wait()


def _reason(log: Path, code: int) -> str:
    """Return a failed command's last line, or a sentence about exhausted memory."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = next((line for line in reversed(lines) if any(word in line for word in _OUT_OF_MEMORY)), None)
    said = found or (lines[-1] if lines else "it printed nothing")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{said[:200]} ({how}; {log})"

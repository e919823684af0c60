"""Build a library of casts in a separate process: LLVM kills a process that cannot write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qsync.errors import BuildError
from qsync.processes.child_processes import environment


def run_apart(code: str, path: Path) -> None:
    """Run Python `code` that writes a library to `path`, in a separate process. Raises BuildError."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; path = sys.argv[1]; {code}", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1].rstrip(".") if lines else f"exit code {done.returncode}"
        raise BuildError(
            f"TVM cannot compile and link the casts ({last}); install a C++ compiler (g++ or clang++) and "
            f"see that there is room in {path.parent}"
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__

"""One rank of a test's job, forked from a process that has imported torch and qsync."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(script: Path, outputs: Sequence[Path], environment: Mapping[str, str]) -> None:
    """Run a script as a program, with an environment and the files that it prints to."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), descriptor)
    runpy.run_path(str(script), run_name="__main__")

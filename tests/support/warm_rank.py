"""One rank of a test's job, forked from a process that has imported torch and qsync."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path


def run(script: Path, outputs: Sequence[Connection], environment: Mapping[str, str]) -> None:
    """Run a script as a program, with an environment and the pipes that it prints to."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), descriptor)
        output.close()
    runpy.run_path(str(script), run_name="__main__")

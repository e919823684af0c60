"""Python processes that this one starts import what this one imports, in whichever folder they start."""

from __future__ import annotations

import os
import sys


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, with its module search path and the given variables.

    `-m` and `-c` alone would put the current folder first, where a file `random.py` or a clone's folder
    `qsync` hides what is meant, and know nothing of what a script has added to its `sys.path`.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # an empty entry is the current folder
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **variables}

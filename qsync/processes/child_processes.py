"""Start Python processes that import the same modules as this one, in any working folder."""

from __future__ import annotations

import os
import sys


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, with its module search path and the given variables.

    `-m` and `-c` alone put the current folder first, where a file `random.py` or a folder `qsync` hides the
    real module, and ignore a script's additions to `sys.path`.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # an empty entry means the current folder
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **variables}

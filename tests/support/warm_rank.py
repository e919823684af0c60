"""A program in a process that is forked from one that has imported torch and qsync."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path


def run(
    script: Path, arguments: Sequence[str], outputs: Sequence[Connection], environment: Mapping[str, str]
) -> None:
    """Run a script as Python would, with an environment and the pipes that it prints to.

    Threads of gloo that still hold tensors abort an interpreter that ends before them (pytorch#179291): all
    that Python does at its end is done, then the process ends.
    """
    gc.freeze()  # what was imported before the fork stays, and its pages stay shared
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), descriptor)
    for output in outputs:
        output.close()
    multiprocessing.set_start_method(None, force=True)  # its own processes start as the system's do
    sys.argv = [str(script), *arguments]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        code, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""A lighthouse of its own for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lighthouse() -> Iterator[str]:
    """Run `qsync lighthouse` on a free port; yield its address, and kill it afterwards."""
    command = [sys.executable, "-m", "qsync", "lighthouse", "--json", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            text = ""
            while "}" not in text:
                line = server.stdout.readline()  # type: ignore[union-attr]
                assert line, "the lighthouse has ended"
                text += line
            yield json.loads(text)["lighthouse"]
        finally:
            server.kill()

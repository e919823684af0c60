"""Run a script as two cards of an elastic job at a lighthouse of their own: `with_lighthouse.py SCRIPT`."""

from __future__ import annotations

import os
import subprocess
import sys

from lighthouses import lighthouse

if __name__ == "__main__":
    with lighthouse() as address:
        command, environment = [sys.executable, sys.argv[1]], {**os.environ, "QSYNC_LIGHTHOUSE": address}
        cards = [subprocess.Popen(command, env=environment) for _ in range(2)]
        sys.exit(max(abs(card.wait(timeout=200)) for card in cards))

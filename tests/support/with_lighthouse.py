"""Run a script as two cards of an elastic job at a lighthouse of their own: `with_lighthouse.py SCRIPT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def main(script: str) -> int:
    command = [sys.executable, "-m", "qsync", "lighthouse", "--json", "--port", "0"]
    lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert lighthouse.stdout is not None
        text = ""
        while "}" not in text:
            text += lighthouse.stdout.readline()
        environment = {**os.environ, "QSYNC_LIGHTHOUSE": json.loads(text)["lighthouse"]}
        cards = [subprocess.Popen([sys.executable, script], env=environment) for _ in range(2)]
        return max(abs(card.wait(timeout=200)) for card in cards)
    finally:
        lighthouse.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Measure the cost of killed ranks under torchrun, which restarts from the last checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from qsync.errors import QSyncError
from qsync.experiments.elastic.cluster import DEFAULTS
from qsync.experiments.elastic.torchrun import RANKS, STEPS_PER_CHECKPOINT, start

_RECOVERY_S = 240.0


def measure(folder: Path, num_events: int, seed: int) -> dict[str, float]:
    """Kill random ranks; return the median seconds of a step, and those lost per event.

    Lost time ends when the job is further than before the event.
    """
    log, draw, lost = folder / f"{RANKS[0]}.jsonl", random.Random(seed), []
    job = start(folder, DEFAULTS, "--max-restarts=100")
    try:
        _wait(log, 100)
        for number in range(num_events):
            rank = draw.randrange(len(RANKS))
            before, start_s = _last(log), time.monotonic()
            os.kill(int((folder / f"{rank}.pid").read_text()), signal.SIGKILL)
            lost.append(_wait(log, before + 1, number) - start_s)
            _wait(log, before + 100 + draw.randrange(STEPS_PER_CHECKPOINT), number)
    finally:
        job.terminate()  # torchrun then ends its ranks
        job.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    step_s = median(b["at"] - a["at"] for a, b in pairwise(lines))
    return {"lost_s_per_event": median(lost), "step_s": step_s, "events": num_events}


def _last(log: Path) -> int:
    lines = log.read_text().splitlines() if log.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else -1


def _wait(log: Path, step: int, number: int = 0) -> float:
    until = time.monotonic() + _RECOVERY_S
    while _last(log) < step:
        if time.monotonic() > until:
            raise QSyncError(
                f"the job under torchrun did not reach step {step} after event {number}; see its log"
            )
        time.sleep(0.05)
    return time.monotonic()

"""Slow a card and let it recover: the job must plan for it once, and return once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from qsync.errors import QSyncError
from qsync.experiments.elastic.cluster import Cards
from qsync.experiments.elastic.events import NAMES

SLOWED, FACTOR = "infer-1", 2.0
_MOST_S = 300.0


def measure(folder: Path, steps: int, **settings: Any) -> dict[str, Any]:
    """Slow a card for some steps, between equally many at full speed; return the job's log of it."""
    with Cards(folder, **settings) as cards:
        for name in NAMES:
            cards.start(name)
        for factor in (1.0, FACTOR, 1.0):
            cards.slow(SLOWED, factor)
            _wait(cards, len(cards.steps(SLOWED)) + steps)
        logged = [
            {"card": name, "at": line["at"], "text": line["text"]}
            for name in NAMES for line in cards.lines(name) if line.get("event") == "says"
        ]  # fmt: skip
        digests = [{line["step"]: line["digest"] for line in cards.steps(name)} for name in NAMES]
    unequal = sum(len({one[step] for one in digests if step in one}) > 1 for step in digests[0])
    told = [one for one in logged if "the job plans for that" in one["text"]]
    return {"told": told, "unequal_steps": unequal}


def _wait(cards: Cards, steps: int) -> None:
    until = time.time() + _MOST_S
    while len(cards.steps(SLOWED)) < steps:
        if time.time() > until or not cards.is_running(SLOWED):
            raise QSyncError(f"{SLOWED} did not take {steps} steps: {cards.errors(SLOWED)}")
        time.sleep(0.1)

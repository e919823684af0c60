"""Compare elastic and hybrid training without events: step times in turns, and bitwise losses.

The hybrid job uses the elastic job's plan and samples.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from qsync.errors import QSyncError
from qsync.experiments.elastic.cluster import Cards
from qsync.experiments.elastic.events import NAMES
from qsync.experiments.elastic.torchrun import start

_WARM_UP = 80  # untimed steps, during which the next memberships are planned


def compare(folder: Path, steps: int, rounds: int, **settings: Any) -> dict[str, Any]:
    """Train some steps in both ways, in turns; return median step times, and whether losses are equal."""
    seconds: dict[str, list[float]] = {"elastic": [], "hybrid": []}
    equal = []
    for number in range(rounds):
        with Cards(folder / f"elastic-{number}", steps=steps, keep_plan=True, **settings) as cards:
            for name in NAMES:
                cards.start(name)
            for name in NAMES:
                cards.processes[name].wait(timeout=600)
            elastic = {name: cards.steps(name) for name in NAMES}
        of_hybrid = folder / f"hybrid-{number}"
        job = start(of_hybrid, {**cards.settings, "plan": str(cards.folder / "plan.json")})
        if job.wait(timeout=600) != 0:
            raise QSyncError("the hybrid job failed; its first message above says why")
        hybrid = {
            name: [json.loads(line) for line in (of_hybrid / f"{name}.jsonl").read_text().splitlines()]
            for name in NAMES
        }
        for arm, logs in (("elastic", elastic), ("hybrid", hybrid)):
            ends = [line["at"] for line in logs[NAMES[0]]][_WARM_UP:]
            seconds[arm].append(median(b - a for a, b in pairwise(ends)))
        equal.append(all(
            (one["loss"], one["digest"]) == (two["loss"], two["digest"])
            for name in NAMES for one, two in zip(elastic[name], hybrid[name], strict=True)
        ))  # fmt: skip
    ratios = [one / two for one, two in zip(*seconds.values(), strict=True)]
    return {"seconds": seconds, "ratio": median(ratios), "bitwise_equal": all(equal), "steps": steps}

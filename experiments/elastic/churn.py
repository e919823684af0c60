"""Simulate the churn of a real job's events."""

from __future__ import annotations

from statistics import median
from typing import Any

from qsync.experiments.elastic.cluster import BATCH_SIZE, FAST, WEAK
from qsync.experiments.elastic.events import NAMES
from qsync.replayer.churn import ChurnCosts, ChurnEvent, play


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    """Simulate a real job's events with its own step times and costs; return both step counts."""
    begin, end = job["steps"][0][0], job["steps"][-1][0]
    costs = costs_of(job["events"])
    found: list[ChurnEvent] = []
    for event in job["events"]:
        at = max(0.0, event["at"] - begin)
        if event["kind"] == "lighthouse":
            found.append(ChurnEvent(at, "lighthouse"))
        for name in event["cards"]:
            card = f"{name.rpartition('-')[0]}:{_place(name)}"
            if event["kind"] == "stop":
                found += [ChurnEvent(at, "stop", card), ChurnEvent(at + event["away_s"], "cont", card)]
            else:
                kind = {"two": "kill", "ask": "release"}.get(event["kind"], event["kind"])
                found.append(ChurnEvent(at, kind, card))
    found = [event for event in sorted(found, key=lambda one: one.time_s) if event.time_s < end - begin]
    found.append(ChurnEvent(end - begin, "end"))
    usual = {tuple(key.split("+")): seconds for key, seconds in job["usual_s"].items()}

    def step_s(ranks: Any) -> float:
        classes = tuple(sorted(name for name, count in ranks.items() for _ in range(count)))
        return float(usual.get(classes) or median(usual.values()))

    report = play(found, {FAST: 2, WEAK: 2}, step_s, costs, samples_per_step=BATCH_SIZE)
    real = len(job["steps"])
    return {
        "steps": real, "simulated_steps": report.num_steps, "ratio": report.num_steps / real,
        "lost_s": dict(report.lost_s), "real_lost_s": job["lost_s"],
        "costs": {name: getattr(costs, name) for name in costs.__dataclass_fields__},
    }  # fmt: skip


def costs_of(happened: list[dict[str, Any]]) -> ChurnCosts:
    """Return the median costs of a job's events."""

    def cost(default: float, *kinds: str) -> float:
        seconds = [one["recovered"] - one["at"] for one in happened if one["kind"] in kinds]
        return median(seconds) if seconds else default

    return ChurnCosts(
        detection_s=cost(1.0, "kill", "two"), timeout_s=cost(1.5, "stop"), reconfiguration_s=0.05,
        lighthouse_s=cost(1.0, "lighthouse"), release_s=1.0, transfer_s=0.0, start_s=cost(3.0, "join"),
    )  # fmt: skip


def _place(name: str) -> int:
    kind = name.rpartition("-")[0]
    return [one for one in NAMES if one.startswith(kind)].index(name)

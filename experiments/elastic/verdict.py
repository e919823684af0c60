"""What the logs of an elastic job must show, whatever happened to its cards.

A step may count twice: where all cards that completed it died before anybody knew. The steps that the final
state has behind it form one chain, linked by the histories that cards logged; the others were undone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from qsync.elastic_training.shares import SampleOrder
from qsync.errors import QSyncError
from qsync.records.graph import digest

Line = dict[str, Any]


def chain(logs: Mapping[str, Sequence[Line]]) -> list[list[Line]]:
    """Return the lines of every step that the final state has behind it, in order.

    Raises QSyncError where the chain is broken: a step that is behind the state was never logged.
    """
    by_result: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for card, lines in logs.items():
        for line in lines:
            if "digest" in line:
                result = digest([line["history"], line["group"]])
                by_result[line["step"], result].append({**line, "card": card})
    step, result = max(by_result)
    found: list[list[Line]] = []
    while True:
        lines = by_result.get((step, result), [])
        if not lines:
            raise QSyncError(f"step {step} is behind the final state, and no card logged it")
        found.append(lines)
        step, result = step - 1, lines[0]["history"]
        if step < 0:
            return found[::-1]


def judge(logs: Mapping[str, Sequence[Line]], batch_size: int, num_samples: int, seed: int) -> dict[str, Any]:
    """Return the numbers of steps whose replicas, batch or samples are wrong, and of samples by epoch.

    The samples of a card that was killed between its step and its log are those that the others leave.
    """
    order, steps = SampleOrder(num_samples, seed), chain(logs)
    wrong: Counter[str] = Counter()
    seen: Counter[tuple[int, int]] = Counter()
    for number, lines in enumerate(steps):
        wrong["replicas"] += len({line["digest"] for line in lines}) > 1
        parts = [line["samples"] for line in lines if not line["behind"]]
        together = [index for part in parts for index in part]
        expected = order.indices(number * batch_size, batch_size)
        missing = set(lines[0]["cards"]) - {line["card"] for line in lines}
        left = Counter(expected) - Counter(together)
        wrong["batch"] += bool(Counter(together) - Counter(expected)) or bool(left and not missing)
        wrong["unlogged"] += bool(left)
        for place, index in enumerate(expected):
            seen[(number * batch_size + place) // num_samples, index] += 1
    whole = len(steps) * batch_size // num_samples
    wrong["samples"] = sum(seen[epoch, index] != 1 for epoch in range(whole) for index in range(num_samples))
    logged = {
        (line["step"], line["history"]) for lines in logs.values() for line in lines if "digest" in line
    }
    return {
        "steps": len(steps), "epochs": whole, "undone": len(logged) - len(steps), **{
            name: wrong[name] for name in ("replicas", "batch", "samples", "unlogged")
        },
    }  # fmt: skip


def dropped_by_event(logs: Mapping[str, Sequence[Line]], events: Sequence[Line]) -> list[int]:
    """Return how many steps were dropped after each event, before the next."""
    starts = [event["at"] for event in events]
    found: list[set[int]] = [set() for _ in events]
    for lines in logs.values():
        for line in lines:
            if line.get("event") == "dropped" and line["at"] >= starts[0]:
                found[bisect_right(starts, line["at"]) - 1].add(line["step"])
    return [len(steps) for steps in found]


def lost_seconds(steps: Sequence[Sequence[Line]]) -> tuple[float, float]:
    """Return the seconds of training, and those lost: beyond the usual step of each number of cards."""
    ends = [min(line["at"] for line in lines) for lines in steps]
    spans: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for before, after, lines in zip(ends, ends[1:], steps[1:], strict=False):
        spans[_classes(lines[0])].append(after - before)
    usual = {classes: median(seconds) for classes, seconds in spans.items()}
    ideal = sum(usual[_classes(lines[0])] for lines in steps[1:])
    return ends[-1] - ends[0], max(0.0, ends[-1] - ends[0] - ideal)


def _classes(line: Line) -> tuple[str, ...]:
    return tuple(sorted(card.rpartition("-")[0] for card in line["cards"]))

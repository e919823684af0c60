"""Check the logs of an elastic job after random events.

A step may be logged twice, if all cards that completed it died before telling others. The steps behind the
final state form one chain, linked by the histories logged after each; other steps were undone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from qsync.distributed.shares import SampleOrder
from qsync.errors import QSyncError
from qsync.records.graph import digest

Line = dict[str, Any]


def chain(logs: Mapping[str, Sequence[Line]]) -> list[list[Line]]:
    """Return the log lines of all steps behind the final state, in order.

    Raises QSyncError for a broken chain: a step that was never logged.
    """
    by_step: dict[int, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for card, lines in logs.items():
        for line in lines:
            if "digest" in line:
                by_step[line["step"]][line["history"]].append({**line, "card": card})
    last = max(by_step)
    history = max(by_step[last])
    found = [by_step[last][history]]
    for step in reversed(range(last)):
        group, after = found[-1][0]["group"], history
        history = next((one for one in by_step[step] if digest([one, group]) == after), "")
        if not history:
            raise QSyncError(f"step {step} is behind the final state, and no card logged it")
        found.append(by_step[step][history])
    return found[::-1]


def judge(logs: Mapping[str, Sequence[Line]], batch_size: int, num_samples: int, seed: int) -> dict[str, Any]:
    """Count steps with wrong replicas, batches or samples, and check the samples of each epoch.

    A card killed between its step and its log is assumed to have trained the samples that the others did not.
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
    """Return the number of dropped steps after each event, before the next."""
    starts = [event["at"] for event in events]
    found: list[set[int]] = [set() for _ in events]
    for lines in logs.values():
        for line in lines:
            if line.get("event") == "dropped" and line["at"] >= starts[0]:
                found[bisect_right(starts, line["at"]) - 1].add(line["step"])
    return [len(steps) for steps in found]


def usual_step_s(steps: Sequence[Sequence[Line]]) -> dict[str, float]:
    """Return the median seconds between steps, by the classes of the cards: "infer+train"."""
    spans: dict[str, list[float]] = defaultdict(list)
    for before, lines in pairwise(steps):
        spans[_classes(lines[0])].append(_end(lines) - _end(before))
    return {classes: median(seconds) for classes, seconds in spans.items()}


def lost_seconds(steps: Sequence[Sequence[Line]]) -> tuple[float, float]:
    """Return the seconds of training, and those in excess of the usual steps of each membership."""
    usual, seconds = usual_step_s(steps), _end(steps[-1]) - _end(steps[0])
    return seconds, max(0.0, seconds - sum(usual[_classes(lines[0])] for lines in steps[1:]))


def _end(lines: Sequence[Line]) -> float:
    return min(float(line["at"]) for line in lines)


def _classes(line: Line) -> str:
    return "+".join(sorted(card.rpartition("-")[0] for card in line["cards"]))

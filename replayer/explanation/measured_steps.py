"""Measured steps: logs of all ranks, beside predictions. Reads files; no clock, no torch.

A rank alone cannot tell whether other ranks or the network block it. As in replay, the blocked time of the
least blocked rank is exposed communication. Any further blocked time of a rank is waiting for other ranks.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, shortened
from qsync.records.json_files import read_text
from qsync.replayer.explanation.phases import Drift, Phases, find_drift, median, slowdown

STEPS_PER_WINDOW = 50


def log_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log in a folder of logged steps."""
    return folder / f"rank-{rank}.jsonl"


def split(phases: Phases, exposed_s: float, wait_s: float) -> dict[str, float]:
    """Return the seconds of a step by phase, with exposed communication and waiting as two phases."""
    return {
        "host": phases.host_s, "loading": phases.loading_s, "forward": phases.forward_s,
        "backward": phases.backward_s, "wait": wait_s, "exposed communication": exposed_s,
        "optimizer": phases.optimizer_s,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The steps that every rank logged: step number -> phases by rank.

    `classes` has the device class of each rank, `calls` the number of model calls in its step.
    """

    classes: tuple[str, ...]
    calls: tuple[int, ...]
    steps: Mapping[int, tuple[Phases, ...]]

    @classmethod
    def load(cls, folder: str | Path) -> MeasuredSteps:
        """Read the files of all ranks. Raises FormatError if one is malformed or they share no step."""
        ranks: list[dict[int, tuple[str, int, Phases]]] = []
        while log_file(Path(folder), len(ranks)).is_file():
            ranks.append(_read(log_file(Path(folder), len(ranks))))
        common = sorted(set.intersection(*(set(rank) for rank in ranks))) if ranks else []
        if not common:
            raise FormatError(
                f"{folder} has no step that every rank logged; train longer with "
                "qsync.hybrid(..., log_steps=FOLDER)"
            )
        last = [rank[common[-1]] for rank in ranks]
        return cls(
            tuple(name for name, _, _ in last), tuple(calls for _, calls, _ in last),
            {number: tuple(rank[number][2] for rank in ranks) for number in common},
        )  # fmt: skip

    def by_rank(self) -> list[dict[str, float]]:
        """Return each rank's median seconds of every phase (`split`), over all steps."""
        found = []
        for rank in range(len(self.classes)):
            parts = [split_of(ranks)[rank] for ranks in self.steps.values()]
            found.append({name: statistics.median(part[name] for part in parts) for name in parts[0]})
        return found

    def slowdown(self, predicted: Mapping[str, Phases]) -> float:
        """Return the slowdown of all machines since profiling, from the medians over all steps."""
        by_rank = zip(*self.steps.values(), strict=True)
        return slowdown(predicted, list(zip(self.classes, map(median, by_rank), strict=True)))

    def drifts(self, predicted: Mapping[str, Phases]) -> list[tuple[int, int, Drift]]:
        """Return (first step, last step, drift) of every window of steps slower than predicted.

        Consecutive windows that blame the same rank and phase are merged. Steps after the last full window
        are too few to judge and are left out.
        """
        found: list[tuple[int, int, Drift]] = []
        numbers = list(self.steps)
        for i in range(0, max(1, len(numbers) - STEPS_PER_WINDOW + 1), STEPS_PER_WINDOW):
            window = numbers[i : i + STEPS_PER_WINDOW]
            by_rank = zip(*(self.steps[number] for number in window), strict=True)
            drift = find_drift(predicted, list(zip(self.classes, map(median, by_rank), strict=True)))
            if drift is None:
                continue
            first = window[0]
            if found and found[-1][1] == numbers[i - 1] and drift.blames_same(found[-1][2]):
                first, _, drift = found.pop()
            found.append((first, window[-1], drift))
        return found


def split_of(ranks: Sequence[Phases]) -> list[dict[str, float]]:
    """Return the seconds by phase (`split`) of every rank in one measured step."""
    exposed_s = min(phases.blocked_s for phases in ranks)
    return [split(phases, exposed_s, phases.blocked_s - exposed_s) for phases in ranks]


def _read(path: Path) -> dict[int, tuple[str, int, Phases]]:
    """Return (class, calls, phases) of each step by its number."""
    found = {}
    text = read_text(path, "the folder that qsync.hybrid(..., log_steps=FOLDER) wrote")
    whole = text.rpartition("\n")[0]  # a rank may be killed within a line
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            entry: dict[str, Any] = json.loads(line)
            step, name, calls = (entry.pop(field) for field in ("step", "device_class", "calls"))
            found[int(step)] = (str(name), int(calls), Phases(**{k: _seconds(v) for k, v in entry.items()}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{path}, line {number}: not a logged step ({shortened(error)}); log the steps anew"
            ) from error
    return found


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} seconds")
    return seconds

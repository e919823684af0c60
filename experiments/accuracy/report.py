"""Compare methods, paired by seed, with 95 % intervals; draw tables and bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from qsync.experiments.accuracy.methods import METHODS, NAMES
from qsync.experiments.harness import Bar, bar, table_of
from qsync.experiments.harness.intervals import half_width
from qsync.experiments.mixed.ways import DDP, QSYNC, UNIFORM

_WITHIN = 1.02  # relative to the plan's step: a uniform choice this much slower counts as equal
_BETTER = "families on which a plan beats the fastest uniform choice of at most its step"
LEAST_SEEDS = 5


class Difference(NamedTuple):
    """The mean of paired differences, and its 95 % interval's half width (Student's t)."""

    mean: float
    half: float

    @property
    def above(self) -> bool:
        """Return whether the interval lies above zero: a loss is worse."""
        return self.mean - self.half > 0.0

    @property
    def below(self) -> bool:
        """Return whether the interval lies below zero: a loss is better."""
        return self.mean + self.half < 0.0


def difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Return the mean paired difference of two samples.

    >>> difference([1.0, 2.0], [1.0, 1.0])
    """
    pairs = [a - b for a, b in zip(one, other, strict=True)]
    return Difference(statistics.fmean(pairs), half_width(pairs))


def fastest_uniform(methods: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the fastest uniform choice that is no slower than the plan; None if all are slower."""
    most = methods[QSYNC]["step_s"] * _WITHIN
    able = [name for name in UNIFORM if name in methods and methods[name]["step_s"] <= most]
    return min(able, key=lambda name: float(methods[name]["step_s"]), default=None)


def losses(task: Mapping[str, Any], method: str) -> list[float]:
    """Return the final held-out losses of a method, by seed."""
    return [float(run["final_loss"]) for run in task["runs"][method].values()]


def bars(tasks: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Return the bars: the plan is no worse than FP32, and than the fastest uniform choice.

    Tasks with fewer than 5 seeds are left open.
    """
    found = [
        (name, task) for name, task in tasks.items()
        if len(losses(task, DDP)) >= LEAST_SEEDS
    ]  # fmt: skip
    pairs = [
        (f"{name}: {NAMES[QSYNC]} - {NAMES[uniform]}", difference_of(task, QSYNC, uniform))
        for name, task in found
        if (uniform := fastest_uniform(task["methods"])) is not None
    ]
    worse = [name for name, task in found if difference_of(task, QSYNC, DDP).above]
    better, losing = ([said for said, one in pairs if getattr(one, side)] for side in ("below", "above"))

    def count(names: Collection[str]) -> int | None:
        return len(names) if found else None

    return [
        bar("tasks whose final loss under the plan is above FP32's", count(worse), 0, which=worse),
        bar(_BETTER, count(better), 2, at_least=True, which=better),
        bar("comparisons in which the plan loses to it", count(losing), 0, which=losing),
    ]


def note(bars: Sequence[Bar], tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the tasks below the table, and the tasks that bars count."""
    about = [
        f"{name}: {task['description']}; {task['steps']} steps, {len(losses(task, DDP))} seeds."
        for name, task in tasks.items()
    ]
    counted = [f"{one['name']}: {', '.join(one['which'])}." for one in bars if one.get("which")]
    about.append("Intervals are of one comparison each: of twenty true zeros, one looks like a difference.")
    return "\n".join([*about, *counted])


def difference_of(task: Mapping[str, Any], one: str, other: str) -> Difference:
    """Return the final loss of a method minus that of another, paired by seed."""
    return difference(losses(task, one), losses(task, other))


def table(tasks: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of methods by task: FP32's loss, the excess of others, each step over FP32's."""
    rows = [[NAMES[method], *(_cell(of, method) for of in tasks.values())] for method in METHODS]
    title = "Final held-out loss: FP32's, and what others end above it (step over FP32's, simulated)"
    return table_of(title, ("", *tasks), rows)


def _cell(task: Mapping[str, Any], method: str) -> str:
    steps, fp32 = task["methods"], statistics.fmean(losses(task, DDP))
    found = f"{fp32:.4g}" if method == DDP else _percent(difference_of(task, method, DDP), fp32)
    return f"{found} ({steps[method]['step_s'] / steps[DDP]['step_s']:.2f})"


def _percent(found: Difference, fp32: float) -> str:
    """Format a loss's relative excess over FP32's."""
    half = "(one seed)" if math.isinf(found.half) else f"± {found.half / fp32:.2%}"
    return f"{found.mean / fp32:+.2%} {half}"

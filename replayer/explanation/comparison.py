"""Comparison of predicted with measured steps: the error of replay, by cause. It reads no clock.

The step of a class has these parts, and so has the miss (measured less predicted):

    kernel         its operators, forward and backward
    cast           the casts between them
    loading        waiting for the next batch
    host           the loss outside the graph, the optimizer, Python
    wait           the time for which the class is blocked longer than the least blocked class
    communication  the rest of the step: all-reduces with nothing left to compute, the compute lost
                   beside others, and filling the buckets
    rest           the same where there is one rank alone: it should be nothing
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsync.lowering.lowered_graph import Cast, Run
from qsync.records.graph import Op, OpGraph
from qsync.records.precision import Precision
from qsync.records.profiles import Profile
from qsync.records.record_json import FileRecord
from qsync.replayer.costs.class_costs import node_cost
from qsync.replayer.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Measured:
    """One run on the first rank of one class: seconds of its median step, by part.

    `by_kind` is the time of its nodes by kind of operator and mode ("linear int8"), and of casts by their
    types ("cast fp32 to bf16").
    """

    period_s: float
    host_s: float
    blocked_s: float
    by_kind: Mapping[str, float]
    loading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One plan that was replayed and run. `misses_s` maps class -> cause -> measured less predicted seconds.

    `by_kind` maps class -> kind and mode -> (predicted, measured) seconds. `exposed_s` is the exposed
    communication, (predicted, measured): the time for which the least blocked class is blocked.
    """

    name: str
    assignments: Mapping[str, Mapping[str, str]]
    predicted_s: float
    interval_s: tuple[float, float] | None
    measured_s: float
    misses_s: Mapping[str, Mapping[str, float]]
    by_kind: Mapping[str, Mapping[str, tuple[float, float]]]
    exposed_s: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def inside(self) -> bool | None:
        """Return whether the measured step lies in the predicted interval; None if there is no interval."""
        if self.interval_s is None:
            return None
        return bool(self.interval_s[0] <= self.measured_s <= self.interval_s[1])

    @property
    def cause(self) -> tuple[str, str, float]:
        """The class, cause and seconds of the largest miss that has the sign of the whole miss."""
        sign = 1.0 if self.measured_s >= self.predicted_s else -1.0
        parts = [(c, cause, miss) for c, misses in self.misses_s.items() for cause, miss in misses.items()]
        # A wait follows from the miss of another class, so its seconds count half here.
        return max(parts, key=lambda part: (sign * part[2] * (0.5 if part[1] == "wait" else 1.0), part[:2]))


@dataclass(frozen=True, slots=True)
class Validation(FileRecord):
    """Random plans that were run and compared, with their machine. Both measured and simulated."""

    FILE_KIND = "validation"

    model: str
    machine: Mapping[str, Any]
    seed: int
    comparisons: tuple[Comparison, ...]

    @property
    def median_error(self) -> float:
        """Median of |error| over the runs."""
        return statistics.median(abs(one.error) for one in self.comparisons)

    @property
    def error_95(self) -> float:
        """The |error| that one run in twenty exceeds."""
        return percentile([abs(one.error) for one in self.comparisons], 0.95)


def compare(
    name: str,
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    timeline: Timeline,
    assignments: Mapping[str, Mapping[str, Precision]],
    measured: Mapping[str, Measured],
) -> Comparison:
    """Compare replay's prediction of a plan with its run, by class and cause.

    `measured` is by class. All classes take the same steps: the measured step is the mean of their periods.

    >>> compare("random 1", graph, profiles, timeline, assignments, measured).cause
    """
    least_blocked = min(one.blocked_s for one in measured.values())
    misses: dict[str, dict[str, float]] = {}
    kinds: dict[str, dict[str, tuple[float, float]]] = {}
    for device_class, own in measured.items():
        expected = timeline[device_class]
        by_kind = predicted_by_kind(graph, profiles[device_class], timeline, device_class)
        kinds[device_class] = {
            kind: (by_kind.get(kind, 0.0), own.by_kind.get(kind, 0.0))
            for kind in sorted({*by_kind, *own.by_kind})
        }
        rest = "communication" if sum(c.num_ranks for c in timeline.classes.values()) > 1 else "rest"
        beside = (expected.loading_s, _host_s(profiles[device_class]), expected.wait_s)
        predicted = _parts(timeline.step_s, beside, by_kind, rest)
        beside = (own.loading_s, own.host_s, own.blocked_s - least_blocked)
        found = _parts(own.period_s, beside, own.by_kind, rest)
        misses[device_class] = {cause: found[cause] - predicted[cause] for cause in found}
    return Comparison(
        name,
        {c: {op: str(p) for op, p in assignment.items()} for c, assignment in assignments.items()},
        timeline.step_s,
        timeline.interval_s,
        statistics.fmean(own.period_s for own in measured.values()),
        misses,
        kinds,
        (min(entry.exposed_s for entry in timeline.classes.values()), least_blocked),
    )


def predicted_by_kind(
    graph: OpGraph, profile: Profile, timeline: Timeline, device_class: str
) -> dict[str, float]:
    """Return the seconds of a class's nodes in a timeline, by kind and mode, at full speed."""
    ops = {op.name: op for op in graph.ops}
    totals: dict[str, float] = {}
    for node in timeline.sequence(device_class):
        kind = kind_of(node, ops)
        totals[kind] = totals.get(kind, 0.0) + node_cost(profile, node, ops).total_s
    return totals


def kind_of(node: Cast | Run, ops: Mapping[str, Op]) -> str:
    """Return the kind of a node: its operator's kind and mode, or a cast's types. `ops` are by name."""
    if isinstance(node, Cast):
        return f"cast {node.source} to {node.target}"
    return f"{ops[node.op].kind} {node.mode}"


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that `part` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(1000 * part * len(ordered)) // 1000) - 1))]


def _host_s(profile: Profile) -> float:
    return profile.host_s + profile.outside.total_s + profile.optimizer_s


def _parts(
    step_s: float, beside: tuple[float, float, float], by_kind: Mapping[str, float], rest: str
) -> dict[str, float]:
    """Split a step by cause; `beside` holds loading, host and waiting."""
    cast = sum(seconds for kind, seconds in by_kind.items() if kind.startswith("cast "))
    kernel = sum(by_kind.values()) - cast
    found = dict(zip(("loading", "host", "wait"), beside, strict=True))
    return {"kernel": kernel, "cast": cast, **found, rest: step_s - kernel - cast - sum(beside)}

"""The critical path of a step: the events, over all ranks, whose durations add up to the step. Pure.

The path is walked back from the end of the last all-reduce. An all-reduce starts when the one before it ends,
or when the last class has filled its bucket; the path then goes back through the work of that class to the
start of its step, and to the optimizer of its previous step. A class that still computes after the last
all-reduce never waits, so its own work alone makes the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.record_json import Record
from qsync.replayer.events import WorkClock
from qsync.replayer.simulate import Simulation, simulate_step
from qsync.replayer.synchronous_step import STEADY
from qsync.replayer.timeline import Event

# The `device_class` of an all-reduce, in which every class takes part.
ALL_CLASSES = "all classes"


@dataclass(frozen=True, slots=True)
class PathEvent(Event):
    """One event of the critical path.

    `device_class` is the class whose ranks the others wait for, or ALL_CLASSES for an all-reduce. `slowed_s`
    are the seconds of the duration that overlap costs: all-reduces slow backward, and compute slows an
    all-reduce.
    """

    slowed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CriticalPath(Record):
    """The simulated events of the critical path, in order. Their durations add up to `step_s`."""

    step_s: float
    events: tuple[PathEvent, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the classes whose work is on the path."""
        names = dict.fromkeys(event.device_class for event in self.events)
        return tuple(name for name in names if name != ALL_CLASSES)

    def stretches(self) -> list[tuple[PathEvent, ...]]:
        """Group consecutive events of the same class and phase."""
        runs = groupby(self.events, lambda event: (event.device_class, event.phase))
        return [tuple(run) for _, run in runs]


def find_critical_path(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    *,
    bucket_cap_bytes: int | None = None,
) -> CriticalPath:
    """Return the critical path of a step over all ranks; arguments as for `replay`.

    >>> [event.name for event in find_critical_path(graph, plan, profiles, cluster).events]
    """
    found = simulate_step(graph, plan, profiles, cluster, bucket_cap_bytes)
    return CriticalPath(found.step.reduced_s, tuple(e for e in _path(found) if e.duration_s > 0.0))


def _path(found: Simulation) -> Iterator[PathEvent]:
    step, exchange, zero = found.step, found.exchange, found.zero_s
    names = list(found.costs)
    ready = [start - idle for start, idle in zip(step.starts_s, step.idle_s, strict=True)]
    first, last = _run_of_all_reduces(found)
    begun = last
    if exchange.broadcast_s > 0.0:  # all classes start together, after the one that is ready last
        begun = int(np.argmax(ready))
        at_s = ready[begun] - zero
        yield PathEvent(names[begun], "buffers handed out", "communication", at_s, exchange.broadcast_s)
    outlasts = ready[begun] - found.works[begun].optimizer_s > STEADY * step.reduced_s
    if outlasts or not step.flights:
        yield from _work(found, begun, step.finished_s[begun])
    else:
        yield from _work(found, last, step.flights[first][0])
        yield from _all_reduces(found, first)
    # Event times count from the start of the step, so this is the optimizer at its end.
    end_s = max(step.finished_s[begun], step.reduced_s) - zero
    yield PathEvent(names[begun], "optimizer", "optimizer", end_s, found.works[begun].optimizer_s)


def _run_of_all_reduces(found: Simulation) -> tuple[int, int]:
    """Return the first all-reduce of the last gapless run, and the class that fills its bucket last."""
    flights = found.step.flights
    if not flights:
        return 0, int(np.argmax(found.step.finished_s))
    first = len(flights) - 1
    while first > 0 and flights[first][0] <= flights[first - 1][1]:
        first -= 1
    filled = []
    for c, work in enumerate(found.works):
        clock = WorkClock(found.step.starts_s[c] + work.lead_s, flights, found.rates(c))
        filled.append(float(clock(np.array([work.ready_s[first]]))[0]))
    return first, int(np.argmax(filled))


def _work(found: Simulation, c: int, until_s: float) -> Iterator[PathEvent]:
    """Yield the compute events of class `c` that lie before `until_s`, a time of the `Step`."""
    zero = found.zero_s
    name, flights = list(found.costs)[c], [(start - zero, end - zero) for start, end in found.step.flights]
    for event in found.events():
        own = event.device_class == name and event.kind not in ("communication", "wait", "optimizer")
        if not own or event.start_s + event.duration_s / 2 >= until_s - zero:
            continue
        one = PathEvent(name, event.name, event.kind, event.start_s, event.duration_s)
        lost = zip(flights, found.rates(c) if one.phase == "backward" else (), strict=False)
        yield replace(one, slowed_s=sum(_overlap_s(event, flight) * (1.0 - rate) for flight, rate in lost))


def _all_reduces(found: Simulation, first: int) -> Iterator[PathEvent]:
    exchange = found.exchange
    for k, (start, end) in list(enumerate(found.step.flights))[first:]:
        name = f"all-reduce {k} of {exchange.buckets[k].num_bytes / 2**20:.3g} MiB"
        slowed = max(0.0, end - start - exchange.durations_s[k])
        yield PathEvent(ALL_CLASSES, name, "communication", start - found.zero_s, end - start, slowed)


def _overlap_s(event: Event, flight: tuple[float, float]) -> float:
    end_s = min(event.start_s + event.duration_s, flight[1])
    return max(0.0, end_s - max(event.start_s, flight[0]))

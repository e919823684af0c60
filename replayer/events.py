"""Events: every node of one class's lowered graph in one step, laid out in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.records.profiles import Cost, Profile
from qsync.replayer.costs.class_costs import FloatArray, node_cost
from qsync.replayer.timeline import Event


def class_events(
    name: str,
    profile: Profile,
    lowered: LoweredGraph,
    copies_s: FloatArray,
    times: tuple[float, float, float, float],
    optimizer_s: float,
    launch_waits_s: FloatArray,
    flights: Sequence[tuple[float, float]],
    rates: Sequence[float],
) -> list[Event]:
    """Return the events of one class in one step, from data loading to the optimizer.

    `times` are the start of the class's step, the end of its backward, the end of the last all-reduce, and
    the seconds of its wait. `launch_waits_s` are the seconds for which the device waits for kernel launches
    before each part of the step (`GradientExchange.launch_waits_s`); `optimizer_s` includes the last entry.
    `copies_s[i]` are the seconds of copying gradients to buckets after operator i; the last entry is for
    parameters that no operator uses. `flights` are the all-reduces as (start, end). During all-reduce k,
    backward runs at `rates[k]` of its full speed.
    """
    start, finished, reduced, wait = times
    ops = {op.name: op for op in lowered.graph.ops}
    groups = [[(node, node_cost(profile, node, ops)) for node in nodes] for nodes in _by_operator(lowered)]
    line = _Line(name, start)
    if profile.loading_s > 0.0:
        line.add("data loading", "loading", profile.loading_s)
    waits = launch_waits_s.tolist()
    line.add("host", "host", profile.host_s + waits[0])
    for nodes, wait_s in zip(groups, waits[1:], strict=False):
        line.add_wait(LAUNCHES, wait_s)
        for node, cost in nodes:
            line.add(_label(node), "cast" if isinstance(node, Cast) else "forward", cost.forward_s)
    line.add_wait(f"{LAUNCHES}, loss", waits[len(groups) + 1])
    line.add("loss", "loss", profile.outside.forward_s)
    line.add("loss, backward", "loss", profile.outside.backward_s)
    clock = WorkClock(line.now, flights, rates)
    line.events += _backward(name, lowered, groups, copies_s, clock, waits[len(groups) + 2 :])
    for k, (begin, end) in enumerate(flights):
        line.events.append(Event(name, f"all-reduce {k}", "communication", begin, end - begin))
    if wait > 0.0:
        line.events.append(Event(name, "wait", "wait", finished, wait))
    line.events.append(Event(name, "optimizer", "optimizer", max(finished, reduced), optimizer_s))
    return line.events


# Prefix of event names: the device waits for the host to launch kernels of forward, loss or backward.
LAUNCHES = "kernels not launched yet"


class _Line:
    """Consecutive events of one class at full speed."""

    def __init__(self, device_class: str, now: float) -> None:
        self.device_class, self.now = device_class, now
        self.events: list[Event] = []

    def add(self, name: str, kind: str, duration_s: float) -> None:
        self.events.append(Event(self.device_class, name, kind, self.now, duration_s))
        self.now += duration_s

    def add_wait(self, name: str, duration_s: float) -> None:
        if duration_s > 0.0:
            self.add(name, "host", duration_s)


class WorkClock:
    """A map from seconds of backward work to the time of their completion beside all-reduces."""

    def __init__(self, begin: float, flights: Sequence[tuple[float, float]], rates: Sequence[float]) -> None:
        times, work = [begin], [0.0]
        for (flight_start, flight_end), rate in zip(flights, rates, strict=True):
            for until, speed in ((flight_start, 1.0), (flight_end, rate)):
                if until > times[-1]:
                    work.append(work[-1] + (until - times[-1]) * speed)
                    times.append(until)
        self._times, self._work = np.array(times), np.array(work)

    def __call__(self, work: FloatArray) -> FloatArray:
        """Return the times at which `work` seconds of backward are done."""
        beyond = np.maximum(0.0, work - self._work[-1])
        inside: FloatArray = np.interp(work, self._work, self._times)
        at: FloatArray = inside + beyond
        return at


def _backward(
    name: str,
    lowered: LoweredGraph,
    groups: Sequence[Sequence[tuple[Cast | Run, Cost]]],
    copies_s: FloatArray,
    clock: WorkClock,
    waits_s: Sequence[float],
) -> list[Event]:
    entries: list[tuple[str, str, float]] = []

    def add_wait(wait_s: float) -> None:
        if wait_s > 0.0:
            entries.append((f"{LAUNCHES}, backward", "host", wait_s))

    for (position, nodes), wait_s in zip(reversed(list(enumerate(groups))), waits_s, strict=False):
        add_wait(wait_s)
        for node, cost in reversed(nodes):
            if cost.backward_s > 0.0:
                kind = "cast" if isinstance(node, Cast) else "backward"
                entries.append((f"{_label(node)}, backward", kind, cost.backward_s))
        if copies_s[position] > 0.0:
            op = lowered.graph.ops[position].name
            entries.append((f"{op}, gradients to buckets", "backward", float(copies_s[position])))
    add_wait(waits_s[len(groups)])
    if copies_s[-1] > 0.0:
        entries.append(("unused parameters, gradients to buckets", "backward", float(copies_s[-1])))
    edges = clock(np.concatenate(([0.0], np.cumsum([duration for _, _, duration in entries]))))
    return [
        Event(name, label, kind, float(edges[j]), float(edges[j + 1] - edges[j]))
        for j, (label, kind, _) in enumerate(entries)
    ]


def _by_operator(lowered: LoweredGraph) -> list[list[Cast | Run]]:
    """Group nodes by operator: casts of graph inputs before it, its run, casts of its result."""
    groups: list[list[Cast | Run]] = []
    before: list[Cast | Run] = []
    for node in lowered.nodes:
        if isinstance(node, Run):
            groups.append([*before, node])
            before = []
        elif groups and node.value == lowered.graph.ops[len(groups) - 1].name:
            groups[-1].append(node)
        else:
            before.append(node)
    return groups


def _label(node: Cast | Run) -> str:
    if isinstance(node, Cast):
        return f"{node.value}: {node.source} -> {node.target}"
    return f"{node.op} [{node.mode}]"

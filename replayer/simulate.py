"""Replay one step of all ranks under a plan: its seconds, events and prediction interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync.operators.precision import Precision
from qsync.predictor.memory.vectorized_peak import vectorized_bytes
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer.check_records import costs_of_classes
from qsync.replayer.costs.class_costs import ClassCosts
from qsync.replayer.events import class_events
from qsync.replayer.lazy_sequence import OnAccess
from qsync.replayer.synchronous_step import LEAST_RATE, GradientExchange, Step, Work, steady_step, step_time
from qsync.replayer.timeline import ClassTimeline, Event, Timeline

# Nine in ten values of a normal distribution lie within this many standard deviations.
NINE_IN_TEN = 1.645


# Relative tolerance of step times: with the planned profiles, replay differs by rounding only.
_SAME_STEP = 1e-6


def changed_since_planned(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster
) -> str:
    """Describe how a plan's step time changed with these records; return "" if it did not.

    >>> changed_since_planned(graph, plan, slower_profiles, cluster)
    'the plan was made for a step of 7.8 ms; with these profiles and this cluster it takes 52.3 ms'
    """
    if plan.step_s is None:
        return ""
    step_s = replay(graph, plan, profiles, cluster, bucket_cap_bytes=plan.bucket_cap_bytes).step_s
    if math.isclose(step_s, plan.step_s, rel_tol=_SAME_STEP):
        return ""
    return (
        f"the plan was made for a step of {1e3 * plan.step_s:.4g} ms; with these profiles and this cluster "
        f"it takes {1e3 * step_s:.4g} ms"
    )


def replay(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    *,
    bucket_cap_bytes: int | None = None,
) -> Timeline:
    """Simulate one steady step of every class of the cluster under a plan.

    Args:
        graph: The operators of one step of the model.
        plan: The plan, or a mapping from class names to assignments.
        profiles: The profile of each device class, by name.
        cluster: The device classes, their ranks and links.
        bucket_cap_bytes: DDP's cap in bytes; None means the plan's own, or DDP's defaults.

    Returns:
        The timeline: seconds of the step, waits, and memory of each class.

    Raises:
        MismatchError: Plan, graph, profiles and cluster do not belong together.
        UnsupportedError: A class lacks a precision of the plan.

    Example:
        >>> replay(graph, {"train": {}, "infer": {"fc1": Precision.INT8}}, profiles, cluster).step_s
    """
    found = simulate_step(graph, plan, profiles, cluster, bucket_cap_bytes)
    exchange, works, step = found.exchange, found.works, found.step
    blocked = _blocked_s(step)
    classes: dict[str, ClassTimeline] = {}
    for c, (name, entry) in enumerate(found.costs.items()):
        # The wait of a class is its blocked time minus that of the least blocked class.
        exposed, wait = min(blocked), blocked[c] - min(blocked)
        classes[name] = ClassTimeline(
            compute_s=works[c].total_s,
            loading_s=profiles[name].loading_s,
            slowed_s=step.slowed_s[c],
            exposed_s=exposed,
            wait_s=wait,
            wait_fraction=wait / step.reduced_s if step.reduced_s > 0 else 0.0,
            memory_bytes=int(
                vectorized_bytes(
                    entry.lowering,
                    optimizer_bytes=profiles[name].optimizer_bytes,
                    optimizer_workspace=profiles[name].optimizer_workspace_bytes,
                    num_ranks=cluster.num_ranks,
                    device=cluster[name].device,
                    residuals=profiles[name].memory_residuals,
                ).max()
            ),
            num_ranks=cluster[name].count,
            nodes=OnAccess(lambda entry=entry: entry.lowering.lowered().nodes),  # type: ignore[misc]
            origin=profiles[name].origin,
        )
    uncertainty = [entry.profile.uncertainty for entry in found.costs.values()]
    return Timeline(
        step.reduced_s,
        classes,
        OnAccess(found.events),
        interval_s=_interval(step.reduced_s, works, uncertainty, exchange),
        sent_bytes=exchange.sent_bytes,
    )


@dataclass(frozen=True, slots=True)
class Simulation:
    """A steady step and its simulation's inputs; `works` and `step` have the order of `costs`."""

    exchange: GradientExchange
    costs: Mapping[str, ClassCosts]
    works: Sequence[Work]
    step: Step

    @property
    def zero_s(self) -> float:
        """Return the start of the earliest class's step, which is time 0 of `events`."""
        return min(start - idle for start, idle in zip(self.step.starts_s, self.step.idle_s, strict=True))

    def rates(self, c: int) -> list[float]:
        """Return the relative compute speed of class `c` during each all-reduce (1 is full speed)."""
        return [of_classes[c] for of_classes in self.step.rates]

    def events(self) -> list[Event]:
        """Return all events of the step with their times, class by class."""
        step, exchange, zero = self.step, self.exchange, self.zero_s
        blocked = _blocked_s(step)
        flights = [(start - zero, end - zero) for start, end in step.flights]
        copied_bytes = np.append(exchange.copied_bytes, exchange.unused_bytes)
        events: list[Event] = []
        for c, (name, entry) in enumerate(self.costs.items()):
            copies = copied_bytes * entry.profile.bucket_s_per_byte
            if step.idle_s[c] > 0.0:
                begun = step.starts_s[c] - step.idle_s[c] - zero
                events.append(Event(name, "buffers handed out", "communication", begun, step.idle_s[c]))
            waits = min(blocked[c] - min(blocked), max(0.0, step.reduced_s - step.finished_s[c]))
            times = (step.starts_s[c] - zero, step.finished_s[c] - zero, step.reduced_s - zero, waits)
            events += class_events(
                name, entry.profile, entry.lowering.lowered(), copies, times, self.works[c].optimizer_s,
                exchange.launch_waits_s(entry), flights, self.rates(c),
            )  # fmt: skip
        return events


def simulate_step(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    bucket_cap_bytes: int | None = None,
) -> Simulation:
    """Simulate one steady step of every class; raise MismatchError if the records do not match."""
    if bucket_cap_bytes is None and isinstance(plan, Plan):
        bucket_cap_bytes = plan.bucket_cap_bytes
    if isinstance(plan, Plan) and plan.compression:
        cluster = replace(cluster, compression=plan.compression)
    exchange = GradientExchange(graph, cluster, bucket_cap_bytes)
    costs = costs_of_classes(graph, plan, profiles, cluster)
    works = [exchange.work(entry, name) for name, entry in costs.items()]
    step = steady_step(works, exchange.durations_s, exchange.link, exchange.broadcast_s)
    return Simulation(exchange, costs, works, step)


def _blocked_s(step: Step) -> list[float]:
    """Return the seconds for which each class is blocked: before its step, and after its own work."""
    after = [max(0.0, step.reduced_s - finished) for finished in step.finished_s]
    return [idle + rest for idle, rest in zip(step.idle_s, after, strict=True)]


def _interval(
    step_s: float, works: Sequence[Work], uncertainty: Sequence[float], exchange: GradientExchange
) -> tuple[float, float] | None:
    """Return the 90% interval of the step's seconds; None if profiles and links state no error.

    Its ends are the steps of all classes faster, and of all slower, by NINE_IN_TEN standard deviations. The
    error of communication (`Link.error`) is independent and is added in quadrature.
    """
    beyond_s = NINE_IN_TEN * exchange.link.error * step_s
    if not any(uncertainty) and not beyond_s:
        return None
    fast_s, slow_s = (
        step_time(
            [
                work.slower(max(LEAST_RATE, 1.0 + sign * NINE_IN_TEN * part))
                for work, part in zip(works, uncertainty, strict=True)
            ],
            exchange,
        )
        for sign in (-1.0, 1.0)
    )
    low_s = step_s - math.hypot(step_s - fast_s, beyond_s)
    return max(0.0, low_s), step_s + math.hypot(slow_s - step_s, beyond_s)

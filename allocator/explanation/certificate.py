"""Certificates: a plan checked by full replay, independent of its solver."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qsync.allocator.op_groups import matched_groups
from qsync.allocator.problem import added_variance, check_sensitivity, gradient_weight
from qsync.errors import QSyncError
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.kernel_support import unsupported_by_shape
from qsync.records.plans import ClassPlan, Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import Timeline, replay
from qsync.replayer.slowdown import slowed

# Relative tolerance between a stored prediction and replay's: they may differ by rounding only.
RELATIVE = 1e-6


@dataclass(frozen=True, slots=True)
class Certificate:
    """Replay's simulated figures for a plan, and all violations of the plan's own statements."""

    violations: tuple[str, ...]
    step_s: float | None
    target_s: float | None
    memory_bytes: Mapping[str, int]
    budget_bytes: Mapping[str, int]
    added_variance: Mapping[str, float]

    @property
    def ok(self) -> bool:
        """Return whether the plan has no violation."""
        return not self.violations

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as a JSON object."""
        return {"ok": self.ok, "simulated": True, **asdict(self)}


def check_plan(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
) -> Certificate:
    """Check a plan's legality, step time, memory and variance by replay; list all violations.

    A plan is legal if each class supports its precisions, a kernel exists for each, and the profile measured
    them. Times are in seconds, memory in bytes, variance in squared gradient norm weighted n_c / N^2. A bad
    plan raises no error: every violation is one sentence.

    >>> assert check_plan(graph, plan, profiles, sensitivity, cluster).ok
    """
    limits = {entry.name: plan.budgets.get(entry.name, entry.memory_bytes) for entry in cluster.classes}
    violations = _illegal(graph, plan, profiles, sensitivity, cluster)
    if violations:
        return Certificate(tuple(violations), None, plan.target_s, {}, limits, {})
    try:
        timeline = replay(graph, plan, profiles, cluster)
        variance = {
            c.name: gradient_weight(c, profiles, cluster) * _variance(graph, plan[c.name], sensitivity)
            for c in cluster.classes
        }
    except QSyncError as error:
        return Certificate((str(error),), None, plan.target_s, {}, limits, {})
    violations += _times(plan, timeline)
    added = sum(variance.values())
    if plan.bound is not None and plan.bound > added * (1 + RELATIVE):
        violations.append(
            f"the plan says that none adds less variance than {plan.bound:.9g}, it adds {added:.9g}"
        )
    violations += _late(graph, plan, profiles, cluster)
    for name, limit in limits.items():
        violations += _class_violations(name, plan[name], profiles[name], timeline, variance[name], limit)
    memory = {name: entry.memory_bytes for name, entry in timeline.classes.items()}
    return Certificate(tuple(violations), timeline.step_s, plan.target_s, memory, limits, variance)


def _illegal(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], sensitivity: Sensitivity, cluster: Cluster
) -> list[str]:
    found = []
    try:
        plan.check_graph(graph)
        check_sensitivity(graph, sensitivity)
    except QSyncError as error:
        return [str(error)]
    for device_class in cluster.classes:
        name = device_class.name
        if name not in plan.classes:
            found.append(f"the plan has no device class {name!r}; plan again for this cluster")
            continue
        if name not in profiles:
            found.append(f"there is no profile of device class {name!r}; measure it with qsync.profile")
            continue
        without_kernel = unsupported_by_shape(profiles[name].graph_of(graph), device_class.device)
        for op, precision in plan[name].assignment.items():
            if reason := without_kernel.get(op, {}).get(precision):
                found.append(f"{op} runs in {precision} on {name}, which does not serve it: {reason}")
            elif precision not in device_class.precisions:
                known = ", ".join(device_class.precisions)
                found.append(f"{op} runs in {precision} on {name}, which has only {known}")
            elif precision not in profiles[name].precisions_of(op):
                found.append(
                    f"{op} runs in {precision} on {name}, which was not measured; profile this class again"
                )
            wanted = {to for pattern, to in plan.pins.items() if fnmatch.fnmatchcase(op, pattern)}
            if wanted and precision not in wanted:
                found.append(f"{op} runs in {precision} on {name}, and is pinned to {' or '.join(wanted)}")
    return found + not_alike(graph, plan)


def not_alike(graph: OpGraph, plan: Plan) -> list[str]:
    """Return a sentence per operator whose precision differs from its group (`Plan.together`)."""
    found = []
    for first, *others in matched_groups(graph, plan.together):
        for name, entry in plan.classes.items():
            now = {op: entry.assignment.get(op, Precision.FP32) for op in (first, *others)}
            found += [
                f"{first} and {op} are to run alike, but run in {now[first]} and {now[op]} on {name}"
                for op in others
                if now[op] is not now[first]
            ]
    return found


def _times(plan: Plan, timeline: Timeline) -> list[str]:
    found = []
    if plan.step_s is not None and _differ(plan.step_s, timeline.step_s):
        found.append(f"the plan says a step takes {plan.step_s:.9g} s, replay says {timeline.step_s:.9g} s")
    if plan.target_s is not None and timeline.step_s > plan.target_s * (1 + RELATIVE):
        over = timeline.step_s - plan.target_s
        found.append(
            f"a step takes {timeline.step_s:.9g} s, {over:.3g} s over the target of {plan.target_s:.9g} s"
        )
    return found


def _late(graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster) -> list[str]:
    """Return a sentence if the step misses the target with every class slower by its margin."""
    if plan.target_s is None or plan.margin is None:
        return []
    late = {c.name: slowed(profiles[c.name], 1.0 + plan[c.name].margin) for c in cluster.classes}
    step_s = replay(graph, plan, late, cluster).step_s
    if step_s <= plan.target_s * (1 + RELATIVE):
        return []
    return [
        f"with its classes as late as the margin of {plan.margin:.3%}, a step takes {step_s:.9g} s, "
        f"{step_s - plan.target_s:.3g} s over the target of {plan.target_s:.9g} s"
    ]


def _class_violations(
    name: str, plan: ClassPlan, profile: Profile, timeline: Timeline, variance: float, limit: int
) -> list[str]:
    found = []
    memory = timeline[name].memory_bytes
    if memory > limit:
        found.append(
            f"{name} needs {memory} bytes at its peak, {memory - limit} more than its budget of {limit}"
        )
    if plan.profile_hash is not None and plan.profile_hash != profile.hash:
        found.append(
            f"the plan for {name} was made from profile {plan.profile_hash}, this one is {profile.hash}"
        )
    if plan.predicted is not None:
        again = {
            "computes for": ("s", plan.predicted.compute_s, timeline[name].compute_s),
            "waits": ("s", plan.predicted.wait_s, timeline[name].wait_s),
            "needs": ("bytes", plan.predicted.memory_bytes, memory),
            "adds a variance of": ("", plan.predicted.added_variance, variance),
        }
        for verb, (unit, said, derived) in again.items():
            scale = timeline.step_s if unit == "s" else 0.0
            if _differ(said, derived, scale):
                found.append(
                    f"the plan says {name} {verb} {said:.9g} {unit}, replay says {derived:.9g} {unit}"
                )
    return found


def _variance(graph: OpGraph, plan: ClassPlan, sensitivity: Sensitivity) -> float:
    """Return the gradient variance that a class's assignment adds above its base."""
    assigned = plan.assignment
    return sum(added_variance(sensitivity, op, assigned[op.name], plan.base) for op in graph.adjustable)


def _differ(said: float, derived: float, scale: float = 0.0) -> bool:
    return abs(said - derived) > RELATIVE * max(abs(said), abs(derived), scale)

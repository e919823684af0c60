"""What-ifs: replays with one changed input each, ranked by the seconds that the change saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from qsync.allocator.explanation.plan_state import state_of_plan
from qsync.allocator.explanation.shadow_prices import alternatives
from qsync.allocator.search_state import State
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.record_json import Record
from qsync.replayer.communication import BUCKET_CAP_BYTES
from qsync.replayer.costs.class_costs import ClassCosts, FloatArray, cast_cost, run_cost
from qsync.replayer.explanation.critical_path import find_critical_path
from qsync.replayer.slowdown import slowed
from qsync.replayer.synchronous_step import GradientExchange, step_time

# Gains below this fraction of the step count as rounding.
_MEANINGFUL = 1e-6


@dataclass(frozen=True, slots=True)
class WhatIf(Record):
    """One changed input with all else as planned. Simulated.

    `kind` is link, card, precision, buckets, kernel, loading, host, loss or optimizer. `device_class` is None
    if the change concerns no single class. `won_s` are the seconds saved for a step's samples: one more card
    does not shorten the step, but takes further samples. `variance` is the added gradient variance, and
    `beyond_bytes` the excess over the memory budget.
    """

    kind: str
    what: str
    device_class: str | None
    step_s: float
    won_s: float
    variance: float = 0.0
    beyond_bytes: int = 0


def what_ifs(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
) -> list[WhatIf]:
    """Return the changes that save time, largest saving first; arguments as for `shadow_prices`.

    The changes are links of twice the bandwidth or half the latency, one more card of each class, buckets of
    twice or half the size, every kind of kernel and every other part of a class's step at twice the speed,
    and every other precision of unpinned operators of the classes on the critical path.

    >>> what_ifs(graph, plan, profiles, sensitivity, cluster)[0].what
    """
    state, target_s = state_of_plan(graph, plan, profiles, sensitivity, cluster)
    path, cap = find_critical_path(graph, plan, profiles, cluster), plan.bucket_cap_bytes
    found = [*_links(state, graph, cluster, cap), *_cards(state, graph, cluster, plan, cap)]
    found += _buckets(state, graph, cluster, cap)
    for name in state.classes:
        found += _faster_parts(state, name)
    for name in path.classes:
        found += _precisions(state, name, target_s, plan)
    won = [one for one in found if one.won_s > _MEANINGFUL * path.step_s]
    return sorted(won, key=lambda one: (-one.won_s, one.kind, one.what, one.device_class or ""))


def _step_s(
    state: State, exchange: GradientExchange, changed: Mapping[str, ClassCosts] | None = None
) -> float:
    costs = {name: one.costs for name, one in state.classes.items()} | dict(changed or {})
    return step_time([exchange.work(entry, name) for name, entry in costs.items()], exchange)


def _links(state: State, graph: OpGraph, cluster: Cluster, cap: int | None) -> Iterator[WhatIf]:
    now_s = state.step_s()
    places = [("the link within hosts", True), ("the link between hosts", False)]
    for shown, within in places if cluster.hosts else [("the link", True)]:
        for what, factors in (("twice the bandwidth", {"rate": 2.0}), ("half the latency", {"latency": 0.5})):
            faster = cluster.with_legs(**factors, within=within, between=not within)
            step_s = _step_s(state, GradientExchange(graph, faster, cap))
            yield WhatIf("link", f"{shown} has {what}", None, step_s, now_s - step_s)


def _cards(state: State, graph: OpGraph, cluster: Cluster, plan: Plan, cap: int | None) -> Iterator[WhatIf]:
    samples = {c.name: plan.levers_of(c.name).samples or 1 for c in cluster.classes}
    total = sum(c.count * samples[c.name] for c in cluster.classes)
    for one in cluster.classes:
        more = tuple(replace(c, count=c.count + (c is one)) for c in cluster.classes)
        step_s = _step_s(state, GradientExchange(graph, cluster.with_classes(more), cap))
        won_s = state.step_s() - step_s * total / (total + samples[one.name])
        yield WhatIf("card", f"one more card of {one.name}", one.name, step_s, won_s)


def _buckets(state: State, graph: OpGraph, cluster: Cluster, cap: int | None) -> Iterator[WhatIf]:
    for factor in (2.0, 0.5):
        size = max(1, int(factor * (cap or BUCKET_CAP_BYTES)))
        step_s = _step_s(state, GradientExchange(graph, cluster, size))
        what = f"buckets of {size / 2**20:.3g} MiB (bucket_cap_mb)"
        yield WhatIf("buckets", what, None, step_s, state.step_s() - step_s)


def _faster_parts(state: State, name: str) -> Iterator[WhatIf]:
    """Yield what-ifs with one part of a class's step (such as the loss) twice as fast."""
    costs, profile = state.classes[name].costs, state.classes[name].part.profile
    trials: list[tuple[str, str, ClassCosts]] = []
    for kind, (forward_s, backward_s) in _by_kind(costs).items():
        faster = copy(costs)
        faster.forward_s = costs.forward_s - forward_s / 2
        faster.backward_s = costs.backward_s - backward_s / 2
        trials.append(("kernel", f"kernels of {kind} twice as fast", faster))
    outside = profile.outside._replace(
        forward_s=profile.outside.forward_s / 2, backward_s=profile.outside.backward_s / 2
    )
    for kind, what, other in (
        ("loading", "data loading", replace(profile, loading_s=profile.loading_s / 2)),
        ("host", "the host's part", replace(profile, host_s=profile.host_s / 2)),
        ("loss", "the loss", replace(profile, outside=outside)),
        ("optimizer", "the optimizer", replace(profile, optimizer_s=profile.optimizer_s / 2)),
    ):
        faster = copy(costs)
        faster.profile = other
        trials.append((kind, f"{what} twice as fast", faster))
    if profile.launches:
        faster = copy(costs)
        faster.launches = ClassCosts(costs.lowering, slowed(profile.launches, 0.5))
        trials.append(("host", "launches of kernels twice as fast", faster))
    for kind, what, faster in trials:
        step_s = _step_s(state, state.problem.exchange, {name: faster})
        yield WhatIf(kind, what, name, step_s, state.step_s() - step_s)


def _by_kind(costs: ClassCosts) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return forward and backward seconds per operator, by kind of node (operator or cast)."""
    lowering = costs.lowering
    found: dict[str, tuple[FloatArray, FloatArray]] = {}
    for i, op in enumerate(lowering.graph.ops):
        casts = lowering.anchored_casts(i) + lowering.output_casts(i)
        nodes = [(f"{op.kind} {lowering.mode(i)}", run_cost(costs.profile, lowering.run(i), op))]
        nodes += [(f"cast {cast.source} to {cast.target}", cast_cost(costs.profile, cast)) for cast in casts]
        for kind, cost in nodes:
            if kind not in found:
                found[kind] = np.zeros(len(lowering.graph.ops)), np.zeros(len(lowering.graph.ops))
            found[kind][0][i] += cost.forward_s
            found[kind][1][i] += cost.backward_s
    return found


def _precisions(state: State, name: str, target_s: float, plan: Plan) -> Iterator[WhatIf]:
    now_s = state.step_s()
    for other in alternatives(state, name, target_s, plan):
        what = f"{', '.join(other.ops)} in {other.precision}"
        won_s = now_s - other.step_s
        yield WhatIf("precision", what, name, other.step_s, won_s, other.variance, other.beyond_bytes)

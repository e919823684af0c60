"""Choose how each bucket of gradients travels: the least variance with which a step reaches its target.

Buckets are exchanged one after the other, so kinds are chosen from the first bucket to the last. After each
bucket only states are kept that no other one betters in variance, time, and every class's end of compute.
A bucket whose exchange compute hides gains nothing by compression, and the search finds that by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync.errors import MismatchError
from qsync.records.cluster import Cluster, Link
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer import GradientExchange, replay
from qsync.replayer.costs.class_costs import FloatArray
from qsync.replayer.simulate import simulate_step
from qsync.replayer.synchronous_step import Work, compute_rate, steady_step

SLACK = 0.02  # of the least step that any kinds reach; a plan may take so much longer for less variance
# States kept after each bucket, over the number of buckets; of more, so many stay that are evenly apart.
_STATES_AND_BUCKETS, _LEAST_STATES = 4096, 32
_TRIED = 16  # states that seem the fastest, of which steady steps tell the fastest
_CLOSE = 1e-9  # relative difference of equal step times


@dataclass(frozen=True)
class Ways:
    """Costs of each bucket in each kind: seconds and variance (buckets, kinds), tolls (classes first)."""

    durations_s: FloatArray
    tolls_s: FloatArray
    variance: FloatArray

    def works(self, works: Sequence[Work], chosen: Sequence[int]) -> list[Work]:
        """Return the classes' works with the tolls of the chosen kinds."""
        rows = range(len(chosen))
        return [
            replace(work, tolls_s=tuple(tolls[rows, list(chosen)].tolist()))
            for work, tolls in zip(works, self.tolls_s, strict=True)
        ]

    def step_s(
        self, works: Sequence[Work], chosen: Sequence[int], link: Link, broadcast_s: float = 0.0
    ) -> float:
        """Return the seconds of a steady step with the chosen kinds, an index for each bucket."""
        durations = self.durations_s[range(len(chosen)), list(chosen)].tolist()
        return steady_step(self.works(works, chosen), durations, link, broadcast_s).reduced_s


def choose_kinds(
    works: Sequence[Work],
    ways: Ways,
    link: Link,
    broadcast_s: float = 0.0,
    target_s: float | None = None,
) -> tuple[int, ...]:
    """Return each bucket's kind: the least variance whose step reaches the target, else the least step.

    Without a target it is `SLACK` above the least step. Exact up to eight buckets of common sizes; with more
    of them the best of those states that are kept.

    >>> choose_kinds(works, ways, link, target_s=0.25)
    (0, 0, 2)
    """
    first = ways.works(works, [0] * len(ways.variance))
    starts = steady_step(first, ways.durations_s[:, 0].tolist(), link, broadcast_s).starts_s
    states = _States.at_start(works, starts)
    most = max(_LEAST_STATES, _STATES_AND_BUCKETS // max(1, len(ways.variance)))
    for bucket in range(len(ways.variance)):
        states = states.after(bucket, works, ways, link).best(most)

    def step_s(state: int) -> float:
        return ways.step_s(works, states.chosen[state], link, broadcast_s)

    # A class that computes beyond the last exchange falls behind until all wait for it: a steady step tells.
    ends = states.now[:, None] + states.total - states.done - np.array(starts)
    done_s = np.maximum(states.now, (ends + [work.optimizer_s for work in works]).max(1))
    fastest = min(np.lexsort((states.variance, done_s))[:_TRIED].tolist(), key=step_s)
    least_s = step_s(fastest)
    limit_s = (target_s if target_s is not None else (1.0 + SLACK) * least_s) * (1.0 + _CLOSE)
    by_variance = np.argsort(states.variance, kind="stable").tolist()
    found = next((state for state in by_variance if step_s(state) <= limit_s), fastest)
    return tuple(states.chosen[found].tolist())


@dataclass(frozen=True)
class _States:
    """Partial choices, a row each: their variance, the time, backward work done by then, kinds so far.

    It is `replayer.synchronous_step`'s loop over buckets, for all choices at once.
    """

    variance: FloatArray
    now: FloatArray
    done: FloatArray  # (states, classes)
    total: FloatArray
    chosen: np.ndarray[tuple[int, ...], np.dtype[np.intp]]  # (states, buckets so far)

    @classmethod
    def at_start(cls, works: Sequence[Work], starts: Sequence[float]) -> _States:
        done = np.array([[-start - work.lead_s for start, work in zip(starts, works, strict=True)]])
        total = np.array([work.backward_s for work in works])
        return cls(np.zeros(1), np.zeros(1), done, total, np.zeros((1, 0), dtype=np.intp))

    def after(self, bucket: int, works: Sequence[Work], ways: Ways, link: Link) -> _States:
        """Return all states after one more bucket, in each of its kinds."""
        ready = np.array([work.ready_s[bucket] for work in works])
        gap = np.maximum(0.0, (ready - self.done).max(1))
        now, done = self.now + gap, np.minimum(self.done + gap[:, None], self.total)
        left = self.total - done
        is_alone = (left > 0.0).sum(1) == 1
        parts = []
        for kind, duration in enumerate(ways.durations_s[bucket].tolist()):
            usual, waiting = (
                np.array([
                    compute_rate(replace(work, tolls_s=(tolls[bucket, kind],)), 0, duration, link, alone)
                    for work, tolls in zip(works, ways.tolls_s, strict=True)
                ])
                for alone in (False, True)
            )  # fmt: skip
            rates = np.where(is_alone[:, None], waiting, usual)
            computing = (left / rates).max(1)
            elapsed = np.full(len(now), duration / link.overlap_rate)
            beyond = computing + duration - computing * link.overlap_rate
            elapsed = np.where(elapsed > computing, beyond, elapsed)
            done_after = np.where(left > 0.0, np.minimum(self.total, done + elapsed[:, None] * rates), done)
            chosen = np.column_stack([self.chosen, np.full(len(now), kind)])
            variance = self.variance + ways.variance[bucket, kind]
            parts.append((variance, now + elapsed, done_after, chosen))
        variances, nows, dones, choices = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _States(variances, nows, dones, self.total, choices)

    def best(self, most: int) -> _States:
        """Return at most so many states that no other betters in variance, time and ends of compute."""
        ends = self.now[:, None] + self.total - self.done
        points = np.column_stack([self.variance, self.now, ends])
        order = np.lexsort(points.T[::-1])
        left, kept = points[order], list[int]()
        while len(order):
            kept.append(int(order[0]))
            worse = (left >= left[0] * (1.0 - _CLOSE)).all(1)
            worse[0] = True
            order, left = order[~worse], left[~worse]
        if len(kept) > most:
            kept = [kept[k] for k in np.linspace(0, len(kept) - 1, most).astype(int)]
        return _States(self.variance[kept], self.now[kept], self.done[kept], self.total, self.chosen[kept])


def with_compression(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    errors: Mapping[str, Sequence[float]],
    target_s: float | None = None,
) -> tuple[Plan, list[str]]:
    """Return a plan whose buckets travel as loses least at the target, and a line for each compressed one.

    Args:
        graph: the graph of the plan.
        plan: its precisions, shares and buckets stay.
        profiles: by class, under the plan's levers.
        cluster: its `codecs` are the kinds to choose from, beside FP32.
        errors: by kind the squared error of each bucket's mean gradient, in squared gradient norm.
        target_s: the step to reach; by default `SLACK` above the least one.

    Raises:
        MismatchError: the errors are of other buckets.

    Example:
        >>> plan, lines = with_compression(graph, plan, profiles, cluster, basis.sensitivity.exchange)
        >>> lines
        ['bucket 3 in int8: saves 41 ms, adds 2e-05']
    """
    cap = plan.bucket_cap_bytes
    found = simulate_step(graph, plan, profiles, cluster, cap)
    kinds = ["fp32", *(kind for kind in cluster.codecs if kind in errors)]
    those = found.exchange.buckets
    if any(len(errors[kind]) != len(those) for kind in kinds[1:]):
        raise MismatchError(
            f"the errors of compression were not measured for these {len(those)} buckets; profile again"
        )
    exchanges = [
        GradientExchange(graph, replace(cluster, compression={"*": kind} if kind != "fp32" else {}), cap)
        for kind in kinds
    ]
    tolls = [[one.tolls_s(entry.profile) for one in exchanges] for entry in found.costs.values()]
    ways = Ways(
        np.array([one.durations_s for one in exchanges]).T,
        np.array(tolls).transpose(0, 2, 1),
        np.array([[0.0] * len(those), *(errors[kind] for kind in kinds[1:])]).T,
    )
    link, broadcast_s = found.exchange.link, found.exchange.broadcast_s
    chosen = choose_kinds(found.works, ways, link, broadcast_s, target_s)
    names = {name: kinds[k] for bucket, k in zip(those, chosen, strict=True) for name in bucket.parameters}
    if not any(chosen):
        return plan, []
    lines = _lines(found.works, ways, chosen, kinds, found.exchange)
    variance = float(sum(ways.variance[bucket, kind] for bucket, kind in enumerate(chosen)))
    plan = replace(plan, compression=names, compression_variance=variance)
    timeline = replay(graph, plan, profiles, cluster)
    classes = {
        name: replace(each, predicted=replace(each.predicted, wait_s=timeline[name].wait_s))
        if each.predicted
        else each
        for name, each in plan.classes.items()
    }
    return replace(plan, classes=classes, step_s=timeline.step_s), lines


def _lines(
    works: Sequence[Work], ways: Ways, chosen: Sequence[int], kinds: Sequence[str], exchange: GradientExchange
) -> list[str]:
    """Return for each compressed bucket what its kind saves of the step, and the variance that it adds."""
    link, broadcast_s, lines = exchange.link, exchange.broadcast_s, []
    step_s = ways.step_s(works, chosen, link, broadcast_s)
    for bucket, kind in enumerate(chosen):
        if kind:
            without = [*chosen[:bucket], 0, *chosen[bucket + 1 :]]
            saved_s = ways.step_s(works, without, link, broadcast_s) - step_s
            saves = f"saves {1e3 * saved_s:.3g} ms, adds {ways.variance[bucket, kind]:.2g}"
            lines.append(f"bucket {bucket + 1} in {kinds[kind]}: {saves}")
    return lines

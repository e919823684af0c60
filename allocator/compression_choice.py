"""Choose how each bucket of gradients travels: the least variance with which a step reaches its target.

Buckets are exchanged one after the other, so kinds are chosen from the first bucket to the last. After each
bucket only states are kept that no other one betters in variance, time, and every class's end of compute.
A bucket whose exchange compute hides gains nothing by compression, and the search finds that by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from qsync.allocator.planner import allocate
from qsync.errors import InfeasibleError, MismatchError
from qsync.records.cluster import Link
from qsync.records.compression import kind_of
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import GradientExchange, replay
from qsync.replayer.costs.class_costs import FloatArray
from qsync.replayer.simulate import Simulation, simulate_step
from qsync.replayer.synchronous_step import Work, compute_rate, steady_step

SLACK = 0.02  # of the least step that any kinds reach; a plan may take so much longer for less variance
# States kept after each bucket, over the number of buckets; of more, so many stay that are evenly apart.
_STATES_AND_BUCKETS, _LEAST_STATES = 4096, 32
_TRIED = 16  # states that seem the fastest, of which steady steps tell the fastest
_STARTS = 5  # kinds that the joint search of precisions and kinds begins from
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


def with_compression(basis: Basis, plan: Plan, target_s: float | None = None) -> Plan:
    """Return a plan whose precisions and kinds of buckets together add the least variance at the target.

    Precisions are chosen given the kinds, kinds given the precisions, until nothing improves. That begins
    from several kinds: slow ones, which add little, leave less time to the precisions.

    Args:
        basis: its profiles under the plan's levers. The cluster's `codecs` are the kinds to choose from,
            beside FP32, and the sensitivity's `exchange` has their errors.
        plan: its shares and buckets stay, as do its precisions where it lowers nothing.
        target_s: the step to reach; by default `SLACK` above the least one at the plan's precisions.

    Raises:
        MismatchError: the errors are of other buckets.

    Example:
        >>> compression_lines(basis, with_compression(basis, plan))
        ['bucket 3 in int8: saves 41 ms, adds 2e-05']
    """
    measured = [kind for kind in basis.cluster.codecs if kind in basis.sensitivity.exchange]
    choice = _Choice(basis, plan, measured)
    least_s, plain_s = (choice.step_s(plan, choice.kinds(plan, s)) for s in (0.0, math.inf))
    limit_s = target_s if target_s is not None else (1.0 + SLACK) * least_s
    found = [(plan, choice.kinds(plan, s)) for s in (limit_s, math.inf)]
    is_lowered = any(entry.lowered for entry in plan.classes.values())
    begun = (choice.kinds(plan, float(s)) for s in np.linspace(least_s, plain_s, _STARTS) if is_lowered)
    for kinds in dict.fromkeys(begun):
        added = math.inf
        with suppress(InfeasibleError):
            while choice.variance(at := choice.precisions(kinds, limit_s), kinds) < added * (1.0 - _CLOSE):
                kinds = choice.kinds(at, limit_s)
                added = choice.variance(at, kinds)
                found.append((at, kinds))
    misses = limit_s * (1.0 + _CLOSE)
    return choice.finished(*min(found, key=lambda one: (choice.step_s(*one) > misses, choice.variance(*one))))


def compression_lines(basis: Basis, plan: Plan) -> list[str]:
    """Return a line for each compressed bucket of a plan: what that saves of the step, and adds in variance.

    >>> compression_lines(basis, plan)
    ['bucket 3 in int8: saves 41 ms, adds 2e-05']
    """
    names = plan.compression or basis.cluster.compression
    if not names:
        return []
    choice = _Choice(basis, plan, sorted(set(names.values()) - {"fp32"}))
    chosen = [choice.names.index(str(kind_of(names, bucket.parameters))) for bucket in choice.buckets]
    step_s, lines = choice.step_s(plan, chosen), []
    if choice.is_layered:
        lines.append("buckets are added up on each host, and exchanged between the hosts' leaders")
    for bucket, kind in enumerate(chosen):
        if kind:
            without = [*chosen[:bucket], 0, *chosen[bucket + 1 :]]
            saves = f"saves {1e3 * (choice.step_s(plan, without) - step_s):.3g} ms"
            added = choice.ways.variance[bucket, kind]
            adds = f", adds {added:.2g}" if math.isfinite(added) else ""
            lines.append(f"bucket {bucket + 1} in {choice.names[kind]}: {saves}{adds}")
    return lines


class _Choice:
    """The buckets of a plan, and their costs in each of several kinds and in FP32, the first."""

    def __init__(self, basis: Basis, plan: Plan, kinds: Sequence[str]) -> None:
        self._basis, self._plan = replace(basis, cluster=replace(basis.cluster, compression={})), plan
        self._last: tuple[Plan, Simulation] | None = None
        self.names, cap, errors = ["fp32", *kinds], plan.bucket_cap_bytes, basis.sensitivity.exchange
        clusters = [replace(basis.cluster, compression={"*": kind}) for kind in self.names]
        exchanges = [GradientExchange(basis.graph, cluster, cap) for cluster in clusters]
        first = exchanges[0]
        self.buckets, self.is_layered = first.buckets, first.is_layered
        self._link, self._broadcast_s, num = first.link, first.broadcast_s, len(first.buckets)
        if any(len(errors[kind]) != num for kind in kinds if kind in errors):
            raise MismatchError(
                f"the errors of compression were not measured for these {num} buckets; profile again"
            )
        tolls = [
            [one.tolls_s(basis.profiles[each.name]) for one in exchanges] for each in basis.cluster.classes
        ]
        self.ways = Ways(
            np.array([one.durations_s for one in exchanges]).T,
            np.array(tolls).transpose(0, 2, 1),
            np.array([[0.0] * num, *(errors.get(kind, [math.nan] * num) for kind in kinds)]).T,
        )

    def _simulated(self, plan: Plan) -> Simulation:
        """Simulate a step whose buckets DDP itself sends in FP32; the last one is kept."""
        if self._last is None or self._last[0] is not plan:
            basis, plain = self._basis, replace(plan, compression={})
            self._last = plan, simulate_step(basis.graph, plain, basis.profiles, basis.cluster)
        return self._last[1]

    def kinds(self, plan: Plan, target_s: float) -> tuple[int, ...]:
        """Return the kinds of least variance at a plan's precisions."""
        return choose_kinds(self._simulated(plan).works, self.ways, self._link, self._broadcast_s, target_s)

    def step_s(self, plan: Plan, kinds: Sequence[int]) -> float:
        """Return the seconds of a step with these kinds; in FP32 alone by DDP itself, if that is faster."""
        step = self._simulated(plan)
        step_s = self.ways.step_s(step.works, kinds, self._link, self._broadcast_s)
        return step_s if any(kinds) else min(step_s, step.step.reduced_s)

    def variance(self, plan: Plan, kinds: Sequence[int]) -> float:
        """Return the variance that precisions and kinds add."""
        return (plan.added_variance or 0.0) + float(self.ways.variance[range(len(kinds)), list(kinds)].sum())

    def precisions(self, kinds: Sequence[int], target_s: float) -> Plan:
        """Return the plan with the precisions of least variance given the kinds."""
        basis, plan = self._basis, self._plan
        found = allocate(
            basis.graph, basis.profiles, basis.sensitivity,
            replace(basis.cluster, compression=self._by_parameter(kinds)), target_s=target_s,
            budgets=plan.budgets, pins=plan.pins, together=plan.together, base=str(plan.base),
            bucket_cap_bytes=plan.bucket_cap_bytes, margin=plan.margin or 0.0,
            saving_less={name: entry.saving_less for name, entry in plan.classes.items()},
            lower_all=all(entry.lowered for entry in plan.classes.values()),
        )  # fmt: skip
        return replace(plan, classes=found.classes, bound=found.bound, status=found.status, target_s=target_s)

    def _by_parameter(self, kinds: Sequence[int]) -> dict[str, str]:
        pairs = zip(self.buckets, kinds, strict=True)
        return {name: self.names[kind] for bucket, kind in pairs for name in bucket.parameters}

    def finished(self, plan: Plan, kinds: Sequence[int]) -> Plan:
        """Return the plan with these kinds and its prediction."""
        basis, names = self._basis, self._by_parameter(kinds)
        if not any(kinds) and self.step_s(plan, kinds) >= self._simulated(plan).step.reduced_s:
            names = {}  # DDP itself
            if plan is self._plan:
                return plan
        added = float(self.ways.variance[range(len(kinds)), list(kinds)].sum())
        plan = replace(plan, compression=names, compression_variance=added)
        timeline = replay(basis.graph, plan, basis.profiles, basis.cluster)
        classes = {
            name: replace(each, predicted=replace(each.predicted, wait_s=timeline[name].wait_s))
            if each.predicted
            else each
            for name, each in plan.classes.items()
        }
        return replace(plan, classes=classes, step_s=timeline.step_s)

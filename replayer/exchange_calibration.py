"""Calibration of links and tolls from measured steps, whose all-reduces overlap compute. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.compression import CodecCost
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.replayer.check_records import checked_lowerings
from qsync.replayer.costs.class_costs import ClassCosts
from qsync.replayer.synchronous_step import GradientExchange, Step, Work, steady_step

# Candidate factors on an all-reduce's seconds measured without compute, and on its toll on compute.
FACTORS = np.geomspace(1 / 4, 4, 65)
# Candidate factors on an all-reduce's toll on the only rank that computes.
WAITING_TOLLS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
# The ids of a measured step's plan and profiles, which determine the compute time of every class.
Key = tuple[int, int]
_TURNS = 3  # alternating fits of links and tolls
_NORMAL = 1.4826  # standard deviation of normal errors / median of their absolute values


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Communication seconds of a measured step, as its busiest class (`device_class`) saw them.

    `wait_s` are the step's seconds beyond the compute of that class. Of these, `exposed_s` passed in
    all-reduces after its last gradient; overlapping all-reduces slowed its compute by the rest. `profiles`
    price the step if its numbers of samples differ from the graph's; their tolls are not used.
    """

    plan: Mapping[str, Mapping[str, Precision]]
    device_class: str
    wait_s: float
    exposed_s: float
    profiles: Mapping[str, Profile] | None = None

    @property
    def key(self) -> Key:
        """Return the ids of the step's plan and profiles."""
        return id(self.plan), id(self.profiles)


def with_exchange_in_use(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    measured: Sequence[MeasuredStep],
    bucket_cap_bytes: int | None = None,
) -> tuple[Cluster, dict[str, Profile]]:
    """Return cluster and profiles whose links and tolls make replay match the mean measured step.

    The links are fitted to the exposed seconds. The toll of a class is fitted to the rest of its wait, over
    the steps in which it is the busiest. They are fitted separately, because their seconds add up if ranks
    wait for one rank, but not if ranks arrive together. `waiting_toll` is the factor that fits steps of both
    kinds best. The mean counts, since occasional pauses of a rank lengthen some steps. The links stay as
    measured if compute hides them. The links' `error` is the remaining relative error of replay, over the
    mean steps of all plans. Without measured steps, the result equals the arguments.

    >>> step = MeasuredStep({"train": {}, "infer": {}}, "infer", wait_s=0.091, exposed_s=0.013)
    >>> cluster, profiles = with_exchange_in_use(graph, profiles, cluster, [step])
    """
    if not measured:
        return cluster, dict(profiles)
    fit = _Fit(graph, profiles, cluster, measured, bucket_cap_bytes)
    for _ in range(_TURNS):
        fit.link = _best(fit.exposed_too_long_s)
        fit.fit_tolls()
    error = fit.error()

    scaled = cluster.with_legs(fit.link, 1.0 / fit.link)
    link = replace(scaled.link, error=error, waiting_toll=fit.waiting_toll)
    found = {
        name: replace(
            profile,
            reduce_s_per_call=fit.tolls.get(name, 1.0) * profile.reduce_s_per_call,
            reduce_s_per_byte=fit.tolls.get(name, 1.0) * profile.reduce_s_per_byte,
            exchange_tolls={
                kind: CodecCost(*(fit.tolls.get(name, 1.0) * part for part in toll))
                for kind, toll in profile.exchange_tolls.items()
            },
        )
        for name, profile in profiles.items()
    }
    return replace(scaled, link=link), found


def _best(miss: Callable[[float], float]) -> float:
    """Return the factor with the smallest absolute `miss`; of equal ones, the nearest to 1.

    `miss` never decreases with the factor, so bisection evaluates few factors.
    """

    @cache
    def missed(k: int) -> float:
        return round(miss(float(FACTORS[k])), 6)

    one = len(FACTORS) // 2
    # Search from factor 1 in the direction of smaller misses; `k` counts factors in that direction.
    way = -1 if missed(one) > 0.0 else 1
    ks = range(one + 1)
    crossed = bisect_left(ks, True, key=lambda k: missed(one + way * k) * way >= 0.0)
    least, at = min((abs(missed(one + way * k)), k) for k in {max(0, crossed - 1), min(crossed, one)})
    nearest = bisect_left(ks, True, hi=at, key=lambda k: abs(missed(one + way * k)) <= least)
    return float(FACTORS[one + way * nearest])


def _of_step(step: MeasuredStep, profile: Profile) -> Profile:
    """Return the step's own profile of a class, if it has one, with the tolls of `profile`."""
    own = (step.profiles or {}).get(profile.device_class, profile)
    return replace(
        own,
        reduce_s_per_call=profile.reduce_s_per_call,
        reduce_s_per_byte=profile.reduce_s_per_byte,
        exchange_tolls=profile.exchange_tolls,
    )


class _Fit:
    """Measured steps and their replay, under one factor on all links and one on each class's toll."""

    def __init__(
        self,
        graph: OpGraph,
        profiles: Mapping[str, Profile],
        cluster: Cluster,
        measured: Sequence[MeasuredStep],
        bucket_cap_bytes: int | None,
    ) -> None:
        self._measured, self._link = measured, cluster.link
        self._exchange = GradientExchange(graph, cluster, bucket_cap_bytes)
        self._names = [device_class.name for device_class in cluster.classes]
        self._works: dict[Key, list[Work]] = {}
        for step in measured:
            if step.key not in self._works:
                lowerings = checked_lowerings(graph, step.plan, profiles, cluster)
                self._works[step.key] = [
                    self._exchange.work(ClassCosts(lowerings[name], _of_step(step, profiles[name])), name)
                    for name in self._names
                ]
        self.link, self.waiting_toll = 1.0, 1.0
        self.tolls = dict.fromkeys((step.device_class for step in measured), 1.0)

    def fit_tolls(self) -> None:
        """Fit every class's toll to its mean step, and one waiting toll to the steps of all classes."""
        found: list[tuple[float, float, dict[str, float]]] = []
        for self.waiting_toll in WAITING_TOLLS:
            for name in self.tolls:
                self.tolls[name] = _best(partial(self.waits_too_long_s, name))
            squares = sum(miss_s**2 for miss_s in self._misses_s().values())
            found.append((round(squares, 9), self.waiting_toll, dict(self.tolls)))
        _, self.waiting_toll, self.tolls = min(found, key=lambda one: one[:2])

    def exposed_too_long_s(self, link: float) -> float:
        """Return replayed minus measured exposed seconds under a link factor, averaged over steps."""
        steps = self._steps(link, self.tolls)
        return statistics.fmean(
            max(0.0, steps[m.key].reduced_s - steps[m.key].finished_s[self._at(m)]) - m.exposed_s
            for m in self._measured
        )

    def waits_too_long_s(self, name: str, toll: float) -> float:
        """Return replayed minus measured wait of class `name` under a toll factor, averaged in seconds."""
        steps = self._steps(self.link, {**self.tolls, name: toll})
        return statistics.fmean(self._beyond_s(m, steps) for m in self._measured if m.device_class == name)

    def error(self) -> float:
        """Return the remaining relative error of plans' mean steps, as a standard deviation."""
        steps = self._steps(self.link, self.tolls)
        parts = [abs(miss_s) / steps[key].reduced_s for key, miss_s in self._misses_s().items()]
        return _NORMAL * statistics.median(parts)

    def _misses_s(self) -> dict[Key, float]:
        """Return replayed minus measured wait by plan and profiles, averaged in seconds."""
        steps = self._steps(self.link, self.tolls)
        by_plan: dict[Key, list[float]] = {}
        for m in self._measured:
            by_plan.setdefault(m.key, []).append(self._beyond_s(m, steps))
        return {key: statistics.fmean(found) for key, found in by_plan.items()}

    def _steps(self, link: float, tolls: Mapping[str, float]) -> dict[Key, Step]:
        exchange = self._exchange
        durations = [link * wire_s + s for wire_s, s in zip(exchange.wire_s, exchange.codec_s, strict=True)]
        broadcast_s = link * self._exchange.broadcast_s
        factors = [tolls.get(name, 1.0) for name in self._names]
        beside = replace(self._link, waiting_toll=self.waiting_toll)
        return {
            key: steady_step(
                [replace(work, tolls_s=tuple(factor * s for s in work.tolls_s))
                 for work, factor in zip(works, factors, strict=True)],
                durations, beside, broadcast_s,
            )
            for key, works in self._works.items()
        }  # fmt: skip

    def _beyond_s(self, m: MeasuredStep, steps: Mapping[Key, Step]) -> float:
        own_s = self._works[m.key][self._at(m)].total_s
        return steps[m.key].reduced_s - own_s - m.wait_s

    def _at(self, m: MeasuredStep) -> int:
        return self._names.index(m.device_class)

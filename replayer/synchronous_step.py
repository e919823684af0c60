"""One steady synchronous step of a cluster, from the costs of its device classes.

All ranks of a class behave alike, so each class is simulated once, whatever its count. A step of a class is

    data loading -> host -> forward -> loss -> backward -> (all-reduces done) -> optimizer

and the classes meet in the all-reduces, which run one after the other. Bucket k starts when the slowest class
has computed its gradients and bucket k-1 is done. The simulation steps from bucket to bucket, never from
operator to operator: the times of operators are only summed.

While any class still computes, an all-reduce runs at `link.overlap_rate` of its speed. The toll of an
all-reduce on a class is the compute seconds that the class loses if it computes during the whole all-reduce;
a rank whose peers all wait when the all-reduce starts loses `link.waiting_toll` times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import sub, truediv

import numpy as np

from qsync.operators.precision import type_bytes
from qsync.records.cluster import Cluster, Link
from qsync.records.compression import CodecCost
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.replayer.communication import (
    Bucket,
    Legs,
    bucket_kinds,
    buckets,
    gradient_bytes,
)
from qsync.replayer.costs.class_costs import ClassCosts, FloatArray

# At most MAX_STEPS steps are simulated, until start times change by at most STEADY of a step. Two steps
# suffice unless a class still computes after the last all-reduce: it falls behind until all wait for it.
MAX_STEPS = 100
STEADY = 1e-12

# Relative compute speed of each class (1 is full speed).
Rates = tuple[float, ...]

# Least relative compute speed beside an all-reduce.
LEAST_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """One class's step at full speed.

    `lead_s` are the seconds before backward, `ready_s[k]` the seconds of backward until bucket k is complete,
    `backward_s` the seconds of the whole backward. `tolls_s[k]` are the compute seconds lost to all-reduce k.
    `is_one` says whether the class is one rank, whose peers are all of other classes.
    """

    lead_s: float
    ready_s: tuple[float, ...]
    backward_s: float
    optimizer_s: float
    tolls_s: tuple[float, ...] = ()
    is_one: bool = False

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole step without communication."""
        return self.lead_s + self.backward_s + self.optimizer_s

    def slower(self, factor: float) -> Work:
        """Return this work with all compute times scaled by `factor`."""
        if factor == 1:
            return self
        ready = tuple(factor * at for at in self.ready_s)
        times = (factor * self.lead_s, ready, factor * self.backward_s, factor * self.optimizer_s)
        return Work(*times, self.tolls_s, self.is_one)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all classes, in seconds after the previous step's last all-reduce.

    Per class: the start of its step (`starts_s`), the end of its backward (`finished_s`), the delay of
    backward by overlapping all-reduces (`slowed_s`), and the time between its readiness and the start of its
    step (`idle_s`). `flights` are the all-reduces as (start, end). `rates` has the relative compute speed of
    each class during each all-reduce. `reduced_s` is the end of the last all-reduce; it equals the period
    once the drift between classes is steady.
    """

    starts_s: tuple[float, ...]
    slowed_s: tuple[float, ...]
    finished_s: tuple[float, ...]
    flights: tuple[tuple[float, float], ...]
    reduced_s: float
    rates: tuple[Rates, ...] = ()
    idle_s: tuple[float, ...] = ()


class GradientExchange:
    """The gradient exchange of one graph: buckets, how they travel, its seconds, sent and copied bytes.

    `sent_bytes` are those that each rank sends in a step (in layers: each host's leader to other hosts),
    `durations_s` each bucket's seconds: `wire_s` on the links and `codec_s` beyond them.

    With one rank there is no bucket and no copy. If the model has buffers (running statistics), DDP also
    broadcasts the buffers of rank 0 before every call of the model, and all ranks wait for this broadcast,
    unless the job trains with `broadcast_buffers=False`. All broadcasts of a step are placed at its start.
    """

    def __init__(self, graph: OpGraph, cluster: Cluster, bucket_cap_bytes: int | None = None) -> None:
        self.link: Link = cluster.link
        legs = Legs(cluster)
        self.is_layered = legs.is_layered
        self._single = {device_class.name for device_class in cluster.classes if device_class.count == 1}
        self.buckets: tuple[Bucket, ...] = ()
        self.copied_bytes: FloatArray = np.zeros(len(graph.ops))
        self.unused_bytes = 0
        self.broadcast_s = 0.0
        if cluster.num_ranks > 1:
            broadcast_bytes = sum(
                type_bytes(value.dtype, value.num_elements)
                for value in graph.inputs
                if value.kind == "buffer" and not value.name.startswith("constant:")
            )
            if broadcast_bytes and cluster.broadcasts_buffers:
                self.broadcast_s = graph.num_calls * legs.all_reduce_s(broadcast_bytes)
            self.buckets = buckets(graph, bucket_cap_bytes)
            for position, num_bytes in gradient_bytes(graph).items():
                if position >= 0:
                    self.copied_bytes[position] = num_bytes
                else:
                    self.unused_bytes = num_bytes
        self.kinds = bucket_kinds(graph, cluster, self.buckets)
        shapes = {value.name: value.shape for value in graph.parameters}
        messages = [
            legs.messages(kind, [shapes[name] for name in bucket.parameters], bucket.num_bytes)
            for bucket, kind in zip(self.buckets, self.kinds, strict=True)
        ]
        self.message_bytes = [sum(one.num_bytes for one in of_bucket) for of_bucket in messages]
        self.sent_bytes = sum(
            one.sent_bytes(legs.num_exchanging)
            for of_bucket in messages
            for one in of_bucket
            if not one.is_within_hosts
        )
        parts = [
            legs.exchange_s(kind, of_bucket, bucket.num_bytes)
            for of_bucket, kind, bucket in zip(messages, self.kinds, self.buckets, strict=True)
        ]
        self.wire_s, self.codec_s = (tuple(part[k] for part in parts) for k in (0, 1))
        self.durations_s = tuple(map(sum, parts))
        self._ready = np.array([bucket.ready for bucket in self.buckets], dtype=np.intp)
        self._sizes = np.array([bucket.num_bytes for bucket in self.buckets], dtype=np.float64)

    def work(self, costs: ClassCosts, name: str = "") -> Work:
        """Return the step of one class at full speed, with the copies to buckets in its backward.

        `name` is the class's name, if its profile belongs to another class.
        """
        is_one = (name or costs.profile.device_class) in self._single
        if costs.launches is not None:
            return self._launched_work(costs, costs.launches, is_one)
        profile = costs.profile
        backward = costs.backward_s + self.copied_bytes * profile.bucket_s_per_byte
        # until[i]: backward work done once operator i has run backward.
        until = np.cumsum(backward[::-1])[::-1]
        total = float(until[0]) if len(until) else 0.0
        total += self.unused_bytes * profile.bucket_s_per_byte
        before = profile.loading_s + profile.host_s
        lead = before + float(costs.forward_s.sum()) + profile.outside.total_s
        return self._work(profile, is_one, lead, until, total, profile.optimizer_s)

    def _work(
        self,
        profile: Profile,
        is_one: bool,
        lead_s: float,
        until_s: FloatArray,
        total_s: float,
        optimizer_s: float,
    ) -> Work:
        # A bucket that waits for the end of backward has position -1, and so reads the last entry.
        ready = tuple(np.append(until_s, total_s)[self._ready].tolist())
        return Work(lead_s, ready, total_s, optimizer_s, self.tolls_s(profile), is_one)

    def tolls_s(self, profile: Profile) -> tuple[float, ...]:
        """Return the seconds that each bucket's exchange takes from compute; of unmeasured kinds by bytes."""
        found = []
        for kind, num_bytes, sent in zip(self.kinds, self._sizes.tolist(), self.message_bytes, strict=True):
            is_measured = kind.kind != "fp32" or self.is_layered  # all others are DDP's own all-reduces
            toll = profile.exchange_tolls.get(str(kind)) if is_measured else None
            if toll is None:
                toll, num_bytes = CodecCost(profile.reduce_s_per_call, profile.reduce_s_per_byte), sent
            found.append(max(0.0, toll.seconds(num_bytes)))
        return tuple(found)

    def _launched_work(self, costs: ClassCosts, launches: ClassCosts, is_one: bool) -> Work:
        """Return the step of a class whose host launches kernels that run one after the other.

        A kernel begins once it is launched and the previous kernel is done. So kernel k is done at

            max over j <= k of (launched_j + kernel_j + ... + kernel_k).
        """
        _, done_s = self._kernels_and_done_s(costs, launches)
        num_ops = len(costs.forward_s)
        lead_s, total_s, end_s = (float(done_s[k]) for k in (num_ops + 1, -2, -1))
        until_s = done_s[-3 : num_ops + 1 : -1] - lead_s
        return self._work(costs.profile, is_one, lead_s, until_s, total_s - lead_s, end_s - total_s)

    def launch_waits_s(self, costs: ClassCosts) -> FloatArray:
        """Return the seconds for which the device waits for a launch before each part of a step.

        The parts are those of `_parts_s`. The wait for the batch is excluded.
        """
        if costs.launches is None:
            return np.zeros(2 * len(costs.forward_s) + 4)
        kernels_s, done_s = self._kernels_and_done_s(costs, costs.launches)
        waits_s = np.maximum(0.0, np.diff(done_s, prepend=0.0) - kernels_s)
        waits_s[0] = max(0.0, waits_s[0] - costs.profile.loading_s)
        waits_s[waits_s < STEADY * done_s[-1]] = 0.0  # rounding errors
        return waits_s

    def _kernels_and_done_s(self, costs: ClassCosts, launches: ClassCosts) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of each part's kernels, and the times at which they are done."""
        kernels_s, launched_s = self._parts_s(costs), self._parts_s(launches)
        launched_s[0] += costs.profile.loading_s
        kernels_s[0] -= costs.profile.loading_s  # the host waits for the batch
        done_s = np.cumsum(kernels_s)
        done_s += np.maximum.accumulate(np.cumsum(launched_s) - (done_s - kernels_s))
        return kernels_s, done_s

    def _parts_s(self, costs: ClassCosts) -> FloatArray:
        """Return the seconds of each part of a step, in order.

        The parts are loading and host, each operator's forward, the loss, each operator's backward, copies of
        gradients that no operator computes, and the optimizer.
        """
        profile = costs.profile
        backward = costs.backward_s + self.copied_bytes * profile.bucket_s_per_byte
        before, unused_s = profile.loading_s + profile.host_s, self.unused_bytes * profile.bucket_s_per_byte
        after = [unused_s, profile.optimizer_s]
        return np.concatenate(([before], costs.forward_s, [profile.outside.total_s], backward[::-1], after))


def steady_step(
    works: Sequence[Work], durations_s: Sequence[float], link: Link, broadcast_s: float = 0.0
) -> Step:
    """Return the steady step of ranks that only all-reduces and broadcasts synchronize.

    A class starts its next step as soon as its own optimizer is done. A class with a fast optimizer therefore
    gets ahead, by the same time in every step. If buffers are broadcast before the step, all classes start
    together: `broadcast_s` seconds after the last class is ready.
    """
    starts = tuple(work.optimizer_s for work in works)
    usual = [tuple([compute_rate(work, k, d, link) for work in works]) for k, d in enumerate(durations_s)]
    waiting = usual
    if link.waiting_toll != 1.0:
        waiting = [
            tuple([compute_rate(work, k, d, link, peers_wait=True) for work in works])
            for k, d in enumerate(durations_s)
        ]
    rates = list(zip(usual, waiting, strict=True))
    step = _step(_met(starts, broadcast_s), works, durations_s, rates, link)
    for _ in range(MAX_STEPS - 1):
        ahead = tuple(
            max(0.0, finished - step.reduced_s) + work.optimizer_s
            for finished, work in zip(step.finished_s, works, strict=True)
        )
        if max(map(abs, map(sub, ahead, starts))) <= STEADY * step.reduced_s:
            break
        starts = ahead
        step = _step(_met(starts, broadcast_s), works, durations_s, rates, link)
    return replace(step, idle_s=tuple(b - a for a, b in zip(starts, step.starts_s, strict=True)))


def starts_s(works: Sequence[Work], exchange: GradientExchange) -> tuple[float, ...]:
    """Return the earliest start of each class's next step, in seconds after the last all-reduce.

    >>> starts_s([exchange.work(costs) for costs in by_class], exchange)
    """
    return _met(tuple(work.optimizer_s for work in works), exchange.broadcast_s)


def _met(starts: tuple[float, ...], broadcast_s: float) -> tuple[float, ...]:
    return (max(starts) + broadcast_s,) * len(starts) if broadcast_s else starts


def step_time(works: Sequence[Work], exchange: GradientExchange) -> float:
    """Return the seconds of a steady step; the allocator calls this hundreds of times.

    >>> step_time([exchange.work(costs) for costs in by_class], exchange)
    """
    return steady_step(works, exchange.durations_s, exchange.link, exchange.broadcast_s).reduced_s


def least_losses_s(work: Work, exchange: GradientExchange) -> FloatArray:
    """Return a lower bound on the seconds by which each all-reduce delays a class.

    A class that computes during the all-reduce loses the toll, or less if `LEAST_RATE` limits the loss. A
    class that waits loses the duration of the all-reduce.
    """
    alone = np.array(exchange.durations_s)
    beside = (1.0 - LEAST_RATE) / exchange.link.overlap_rate
    return np.minimum(work.tolls_s, min(beside, 1.0) * alone) if work.tolls_s else np.zeros(len(alone))


def compute_rate(work: Work, bucket: int, duration_s: float, link: Link, peers_wait: bool = False) -> float:
    """Return the relative compute speed of a class during a bucket's all-reduce (1 is full).

    `duration_s` are the seconds of the all-reduce without concurrent compute. A class that computes during
    the whole all-reduce loses the seconds of its toll. `peers_wait` means that no other class computes.
    """
    toll_s = work.tolls_s[bucket] if work.tolls_s else 0.0
    if peers_wait and work.is_one:
        toll_s *= link.waiting_toll
    if duration_s <= 0.0:
        return 1.0
    return max(LEAST_RATE, 1.0 - toll_s * link.overlap_rate / duration_s)


def _step(
    starts: tuple[float, ...],
    works: Sequence[Work],
    durations_s: Sequence[float],
    rates_of_buckets: Sequence[tuple[Rates, Rates]],
    link: Link,
) -> Step:
    """Simulate one step of all classes from their start times, in O(buckets x classes).

    `rates_of_buckets[k]` has the classes' rates in all-reduce k if several compute, and if only one does.
    """
    now = 0.0
    # Backward work done by `now`.
    done = [-start - work.lead_s for start, work in zip(starts, works, strict=True)]
    total = [work.backward_s for work in works]
    slowed = [0.0] * len(works)
    flights, rates_used = [], []
    # For each bucket: the times at which classes fill it, and their rates during its all-reduce.
    ready = zip(*(work.ready_s for work in works), strict=True)
    for duration, ready_s, (usual, waiting) in zip(durations_s, ready, rates_of_buckets, strict=True):
        gap = max(0.0, *map(sub, ready_s, done))
        now += gap
        done = [one + gap if one + gap < most else most for one, most in zip(done, total, strict=True)]
        left = list(map(sub, total, done))
        rates = usual
        if waiting is not usual and sum(seconds > 0.0 for seconds in left) == 1:
            rates = waiting
        rates_used.append(rates)
        computing = max(map(truediv, left, rates))
        elapsed = duration / link.overlap_rate
        # If the last computing class stops before the end, the rest of the all-reduce has full speed.
        if elapsed > computing:
            elapsed = computing + duration - computing * link.overlap_rate
        for c, rate in enumerate(rates):
            if left[c] > 0.0:
                slowed[c] += min(elapsed, left[c] / rate) * (1.0 - rate)
                done[c] = min(total[c], done[c] + elapsed * rate)
        flights.append((now, now + elapsed))
        now += elapsed
    finished = [
        start + work.lead_s + work.backward_s + more
        for start, work, more in zip(starts, works, slowed, strict=True)
    ]
    reduced_s = now if flights else max(finished)
    return Step(starts, tuple(slowed), tuple(finished), tuple(flights), reduced_s, tuple(rates_used))

"""How fast the links are in real steps: measured beside compute, not between bare barriers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from qsync.cluster import Cluster, Link
from qsync.graph import OpGraph
from qsync.precision import Precision
from qsync.profiles import Profile
from qsync.replayer.costs import ClassCosts
from qsync.replayer.simulate import Exchange, checked_lowerings, steady_step

# How many times slower than between barriers an all-reduce may be found, and faster.
FACTORS = np.geomspace(1 / 4, 4, 65)


def in_use(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    runs: Sequence[tuple[Mapping[str, Mapping[str, Precision]], float]],
    bucket_cap_bytes: int | None = None,
) -> Cluster:
    """The cluster with its links as many times slower or faster as makes replay right for the mean run.

    `runs` are plans with the seconds that a step under them took; the mean, as some steps take longer where a
    rank is paused now and then. Where steps do not depend on the links,
    because their work hides behind compute, they stay as they were measured (ours).

    >>> in_use(graph, profiles, cluster, [({"train": {}, "infer": {}}, 0.21)])
    """
    exchange = Exchange(graph, cluster, bucket_cap_bytes)
    works = []
    for plan, _ in runs:
        lowerings = checked_lowerings(graph, plan, profiles, cluster)
        works.append([exchange.work(ClassCosts(one, profiles[name])) for name, one in lowerings.items()])

    measured_s = sum(seconds for _, seconds in runs)

    def miss(factor: float) -> float:
        durations = [factor * seconds for seconds in exchange.durations_s]
        steps = (steady_step(of, durations, cluster.link, factor * exchange.broadcast_s) for of in works)
        return abs(math.log(sum(step.reduced_s for step in steps) / measured_s))

    best = min(FACTORS, key=lambda factor: (round(miss(factor), 4), abs(math.log(factor))))

    def scaled(link: Link) -> Link:
        return replace(link, latency_s=best * link.latency_s, bytes_per_s=link.bytes_per_s / best)

    between = scaled(cluster.between) if cluster.between else None
    return replace(cluster, link=scaled(cluster.link), between=between)

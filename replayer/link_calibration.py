"""Calibration of links by measured steps, in which compute runs beside all-reduces. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from qsync.records.cluster import Cluster, Link
from qsync.records.graph import OpGraph
from qsync.records.precision import Precision
from qsync.records.profiles import Profile
from qsync.replayer.costs.class_costs import ClassCosts
from qsync.replayer.simulate import Exchange, Work, checked_lowerings, steady_step

# Factors tried on the seconds of an all-reduce between bare barriers.
FACTORS = np.geomspace(1 / 4, 4, 65)
_NORMAL = 1.4826  # the standard deviation of normal errors, in medians of their size


def with_links_in_use(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    runs: Sequence[tuple[Mapping[str, Mapping[str, Precision]], str, float]],
    bucket_cap_bytes: int | None = None,
) -> Cluster:
    """Return the cluster with its links scaled so that replay is right for the mean run.

    A run is (plan, class, seconds): the seconds by which a step of the class was longer than the class's own
    work. The mean counts, since a rank paused now and then makes some runs longer. If steps do not depend on
    the links because compute hides them, the links stay as measured. The links' `error` is how far the mean
    steps of each plan still lie from their replay.

    >>> with_links_in_use(graph, profiles, cluster, [({"train": {}, "infer": {}}, "infer", 0.021)])
    """
    exchange = Exchange(graph, cluster, bucket_cap_bytes)
    names = [device_class.name for device_class in cluster.classes]
    known: dict[int, list[Work]] = {}
    for plan, _, _ in runs:
        if id(plan) not in known:
            lowerings = checked_lowerings(graph, plan, profiles, cluster)
            known[id(plan)] = [exchange.work(ClassCosts(lowerings[n], profiles[n])) for n in names]

    def misses(factor: float) -> list[tuple[float, float]]:
        """Return for every run the seconds that replay waits too long, and the step's."""
        durations = [factor * seconds for seconds in exchange.durations_s]
        steps = {
            key: steady_step(works, durations, cluster.link, factor * exchange.broadcast_s)
            for key, works in known.items()
        }
        return [
            (steps[id(plan)].reduced_s - known[id(plan)][names.index(name)].total_s - seconds,
             steps[id(plan)].reduced_s)
            for plan, name, seconds in runs
        ]  # fmt: skip

    def miss(factor: float) -> float:
        return abs(sum(beyond_s for beyond_s, _ in misses(factor))) / len(runs)

    best = min(FACTORS, key=lambda factor: (round(miss(factor), 6), abs(math.log(factor))))

    by_plan: dict[int, list[float]] = {}
    for (plan, _, _), (beyond_s, step_s) in zip(runs, misses(best), strict=True):
        by_plan.setdefault(id(plan), []).append(beyond_s / step_s)
    error = _NORMAL * statistics.median(abs(statistics.fmean(found)) for found in by_plan.values())

    def scaled(link: Link) -> Link:
        return replace(
            link, latency_s=best * link.latency_s, bytes_per_s=link.bytes_per_s / best, error=error
        )

    between = scaled(cluster.between) if cluster.between else None
    return replace(cluster, link=scaled(cluster.link), between=between)

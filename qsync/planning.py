"""The public verbs that need no model and no torch: records in, records out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qsync.allocator import allocate, search
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import Timeline
from qsync.replayer import replay as simulate


def plan(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    levers: Sequence[str] = (),
    **options: Any,
) -> Plan:
    """Choose the precision of every operator on every device class.

    See qsync.allocator.allocate for the options; with `levers` those are searched too, and
    qsync.allocator.levers.search has more options (`other`, `trials`, `storage`, `seed`).

    >>> plan = qsync.plan(graph, {"train": p0, "infer": p1}, sensitivity, cluster)
    >>> plan = qsync.plan(graph, profiles, sensitivity, cluster, levers=["buckets", "recompute"])
    >>> plan = qsync.plan(graph, profiles, sensitivity, cluster, saving_less={"infer": ["*"]})
    """
    if levers:
        return search(graph, profiles, sensitivity, cluster, levers=levers, **options)
    return allocate(graph, profiles, sensitivity, cluster, **options)


def replay(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster, **options: Any
) -> Timeline:
    """What a step under this plan would take on every rank; see qsync.replayer.replay. Simulated.

    >>> timeline = qsync.replay(graph, plan, profiles, cluster)
    """
    return simulate(graph, plan, profiles, cluster, **options)

"""Profiles and a cluster as if the optimizer's state were divided over the ranks. Pure.

`qsync.divide_optimizer` divides it: a rank holds and updates the state of the parameters that it owns, and
owners broadcast the updated weights before the next step. Allocation and replay read the results like any
other profiles and cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from qsync.errors import FormatError, shortened
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.state_division import BUCKET_BYTES, owners
from qsync.replayer.simulate import replay


def spare_parts(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
) -> dict[str, float]:
    """Return by class the bytes that a rank has beyond its peak without optimizer state: parts for `divided`.

    >>> spare_parts(graph, {"train": {}, "infer": {}}, profiles, cluster)
    {'train': 58e9, 'infer': 3e9}
    """
    without = {
        name: replace(profile, optimizer_bytes=profile.optimizer_bytes - sum(_state(graph, profile).values()))
        for name, profile in profiles.items()
    }
    timeline = replay(graph, plan, without, cluster)
    return {c.name: float(max(0, c.memory_bytes - timeline[c.name].memory_bytes)) for c in cluster.classes}


def divided(
    graph: OpGraph, profiles: Mapping[str, Profile], cluster: Cluster, parts: Mapping[str, float]
) -> tuple[dict[str, Profile], Cluster]:
    """Return the profiles, with the state that a rank holds, and the cluster, which broadcasts weights.

    `parts` is the weight of each rank of a class. Of ranks of one class the one with most state counts.
    Raises FormatError for parts that name no class, or leave the state to nobody.

    >>> profiles, cluster = divided(graph, profiles, cluster, {"train": 3, "infer": 1})
    >>> plan = allocate(graph, profiles, sensitivity, cluster)
    """
    for name in parts:
        cluster[name]  # raises FormatError for an unknown class
    weights = [parts.get(c.name, 0.0) for c in cluster.classes for _ in range(c.count)]
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < float("inf"):
        raise FormatError(
            f"parts must be weights from 0 on, one of them above it, found {shortened(dict(parts))}; give "
            "each class one"
        )
    sizes = {value.name: value.num_bytes for value in graph.parameters if value.requires_grad}
    owned: list[list[str]] = [[] for _ in weights]
    for name, rank in owners(sizes, weights).items():
        owned[rank].append(name)
    copied = max(_copied_bytes(sizes[name] for name in those) for those in owned)
    found, first = {}, 0
    for c in cluster.classes:
        ranks = owned[first : first + c.count]
        found[c.name] = _of_rank(graph, profiles[c.name], sizes, ranks, c.device, copied)
        first += c.count
    return found, replace(cluster, broadcasts_weights=True)


def _of_rank(
    graph: OpGraph,
    profile: Profile,
    sizes: Mapping[str, int],
    ranks: list[list[str]],
    device: str,
    copied: int,
) -> Profile:
    """Return the profile of a class whose ranks own these parameters, at the most of any of them.

    On a CPU torch updates parameters one by one, and the largest decides the workspace; on GPUs it updates
    all at once. `copied` are the bytes that the broadcasts copy.
    """
    state = _state(graph, profile)
    most = max(sum(state[name] for name in own) for own in ranks)
    part = max(sum(sizes[name] for name in own) for own in ranks) / sum(sizes.values())
    largest = max((sizes[name] for own in ranks for name in own), default=0) / max(sizes.values())
    workspace = profile.optimizer_workspace_bytes * (largest if device == "cpu" else part)
    return replace(
        profile,
        optimizer_bytes=profile.optimizer_bytes - sum(state.values()) + most,
        optimizer_workspace_bytes=max(round(workspace), copied),
        optimizer_s=profile.optimizer_s * part,
        launches=profile.launches
        and replace(profile.launches, optimizer_s=profile.launches.optimizer_s * part),
        state_bytes={
            name: num_bytes for name, num_bytes in state.items() if any(name in own for own in ranks)
        },
    )


def _state(graph: OpGraph, profile: Profile) -> dict[str, int]:
    """Return the bytes of state by trained parameter: as measured, or else in proportion to their sizes."""
    sizes = {value.name: value.num_bytes for value in graph.parameters if value.requires_grad}
    if profile.state_bytes:
        return {name: profile.state_bytes.get(name, 0) for name in sizes}
    per_byte = profile.optimizer_bytes / max(sum(sizes.values()), 1)
    return {name: int(size * per_byte) for name, size in sizes.items()}


def _copied_bytes(sizes: Iterable[int]) -> int:
    """Return the most bytes that broadcasts copy at once: two buckets, of which one of one parameter is none.

    torch fills buckets in the order of parameters, the largest first, until they reach `BUCKET_BYTES`.
    """
    buckets, filling = [0], list[int]()
    for size in sorted(sizes, reverse=True):
        filling.append(size)
        if sum(filling) >= BUCKET_BYTES:
            buckets.append(sum(filling) if len(filling) > 1 else 0)
            filling = []
    buckets.append(sum(filling) if len(filling) > 1 else 0)
    return max(one + other for one, other in pairwise(buckets))

"""Profiles as if the optimizer's state were divided over the ranks. Pure.

`qsync.divide_optimizer` divides it: a rank holds and updates the state of the parameters that it owns, and
owners broadcast what they updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from qsync.errors import FormatError
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import CarriedTo, ClassLevers, samples_of
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.state_division import BUCKET_BYTES, owners
from qsync.replayer.communication import cluster_all_reduce_s
from qsync.replayer.simulate import replay


def spare_parts(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster
) -> dict[str, float]:
    """Return by class the part of the state for each of its ranks, by the memory that they have to spare.

    That is memory beyond the peak without optimizer state under a plan. Ranks' parts add up to 1. They are
    equal where no class has any to spare.

    >>> spare_parts(graph, plan, profiles, cluster)  # of one A100 and two T4
    {'A100': 0.8, 'T4': 0.1}
    """
    without = {
        name: replace(profile, optimizer_bytes=profile.optimizer_bytes - sum(_state(graph, profile).values()))
        for name, profile in profiles.items()
    }
    timeline = replay(graph, plan, without, cluster)
    spare = {c.name: max(0, c.memory_bytes - timeline[c.name].memory_bytes) for c in cluster.classes}
    total = sum(c.count * spare[c.name] for c in cluster.classes)
    return {name: own / total if total else 1.0 / cluster.num_ranks for name, own in spare.items()}


def divided(
    graph: OpGraph, profiles: Mapping[str, Profile], cluster: Cluster, parts: Mapping[str, float]
) -> dict[str, Profile]:
    """Return the profiles with the part of the state that a rank holds and updates.

    `parts` is the fraction of each rank of a class (`ClassLevers.state_part`). Of ranks of one class the one
    with most state counts. Every rank's optimizer lasts until all ranks have updated their part, and have
    broadcast it, which is priced like an all-reduce of all trained parameters.

    >>> divided(graph, profiles, cluster, {"train": 0.75, "infer": 0.25})["infer"].optimizer_bytes
    """
    weights = [parts[c.name] for c in cluster.classes for _ in range(c.count)]
    if not sum(weights) > 0:
        raise FormatError(
            "the levers leave the optimizer's state to no rank; give a class a state_part above 0"
        )
    sizes = _sizes(graph)
    owned: list[list[str]] = [[] for _ in weights]
    for name, rank in owners(sizes, weights).items():
        owned[rank].append(name)
    copied = max(_copied_bytes(sizes[name] for name in those) for those in owned)
    found, first = {}, 0
    for c in cluster.classes:
        ranks = owned[first : first + c.count]
        found[c.name] = _of_ranks(graph, profiles[c.name], parts[c.name], ranks, c.device)
        first += c.count
    optimizer_s = max(profile.optimizer_s for profile in found.values())
    if cluster.num_ranks > 1:
        optimizer_s += cluster_all_reduce_s(cluster, sum(sizes.values()))
    return {
        name: replace(
            profile, optimizer_s=optimizer_s,
            optimizer_workspace_bytes=max(profile.optimizer_workspace_bytes, copied),
        )
        for name, profile in found.items()
    }  # fmt: skip


def _of_ranks(
    graph: OpGraph, profile: Profile, part: float, ranks: Sequence[Sequence[str]], device: str
) -> Profile:
    """Return the profile of a class whose ranks own these parameters, at the most of any of them.

    On a CPU torch updates parameters one by one, and the largest decides the workspace; on GPUs it updates
    all at once.
    """
    sizes, state = _sizes(graph), _state(graph, profile)
    fullest = max(ranks, key=lambda own: sum(state[name] for name in own))
    held = {name: state[name] for name in fullest}
    share = max(sum(sizes[name] for name in own) for own in ranks) / sum(sizes.values())
    largest = max((sizes[name] for own in ranks for name in own), default=0) / max(sizes.values())
    samples = samples_of(graph)
    setting = profile.setting or CarriedTo(
        graph, samples, graph.shapes_hash, samples, ClassLevers(), (graph, profile)
    )

    def divided(one: Profile) -> Profile:
        return replace(
            one,
            optimizer_bytes=one.optimizer_bytes - sum(state.values()) + sum(held.values()),
            optimizer_workspace_bytes=round(
                one.optimizer_workspace_bytes * (largest if device == "cpu" else share)
            ),
            optimizer_s=one.optimizer_s * share,
            launches=one.launches and replace(one.launches, optimizer_s=one.launches.optimizer_s * share),
            state_bytes=held,
        )

    at, one_pass = setting.one_pass
    levers = replace(setting.levers, state_part=part)
    setting = replace(setting, levers=levers, one_pass=(at, divided(one_pass)))
    return replace(divided(profile), setting=setting)


def _state(graph: OpGraph, profile: Profile) -> dict[str, int]:
    """Return the bytes of state by trained parameter: as measured, or else in proportion to their sizes."""
    sizes = _sizes(graph)
    if profile.state_bytes:
        return {name: profile.state_bytes.get(name, 0) for name in sizes}
    per_byte = profile.optimizer_bytes / max(sum(sizes.values()), 1)
    return {name: int(size * per_byte) for name, size in sizes.items()}


def _sizes(graph: OpGraph) -> dict[str, int]:
    """Return the bytes of each trained parameter."""
    return {value.name: value.num_bytes for value in graph.parameters if value.requires_grad}


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

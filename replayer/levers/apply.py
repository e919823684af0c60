"""Profiles under the levers of a plan, through which replay and allocation price levers. Pure.

A lever changes the step of one class. The class gets a profile of the changed step, which holds the graph of
one pass (`Profile.setting`). Replay, memory and allocation read this profile and graph like any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsync.errors import FormatError, MismatchError
from qsync.operators.precision import keeps_weight_casts
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import CarriedTo, ClassLevers, Levers, samples_of
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.replayer.levers.accumulation import in_passes, with_other_passes
from qsync.replayer.levers.batch_size import Recapture, at_samples, resized
from qsync.replayer.levers.recomputation import mark_recomputed, with_recomputation
from qsync.replayer.levers.state_division import divided


def under_levers(basis: Basis, levers: Levers | None, other: Recapture | None) -> Basis:
    """Return the basis with profiles under a plan's levers; see `profiles_under_levers`."""
    profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, levers, other)
    return replace(basis, profiles=profiles)


def profiles_under_levers(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    levers: Levers | None,
    other: Recapture | None = None,
    known: dict[tuple[str, ClassLevers], Profile] | None = None,
) -> dict[str, Profile]:
    """Return the profiles of the cluster's classes under these levers.

    `other` is a capture of the model, if possible with profiles, with another number of samples; shares and
    passes need it. `known` is a cache of profiles, which this call extends. The global batch stays the same.
    Raises FormatError for shares that do not add up to it, passes that do not divide a share, and numbers of
    samples too far from the profiled ones. Raises MismatchError if `other` is missing or of another model.

    >>> levers = Levers({"infer": ClassLevers(passes=2)})
    >>> profiles = profiles_under_levers(graph, profiles, cluster, levers, other)
    >>> plan = allocate(graph, profiles, sensitivity, cluster)
    """
    for name in levers.classes if levers else ():
        cluster[name]  # raises FormatError for an unknown class
    parts = levers.state_parts if levers else None
    if levers is not None and parts is not None:
        whole = Levers({name: replace(entry, state_part=None) for name, entry in levers.classes.items()})
        found = profiles_under_levers(graph, profiles, cluster, whole, other, known)
        return divided(graph, found, cluster, {c.name: parts.get(c.name, 0.0) for c in cluster.classes})
    if levers is None or all(levers[c.name] == ClassLevers() for c in cluster.classes):
        return dict(profiles)
    captured = samples_of(graph)
    chosen = {
        c.name: replace(levers[c.name], samples=levers[c.name].samples or captured) for c in cluster.classes
    }
    if all(entry == ClassLevers(captured) for entry in chosen.values()):
        return dict(profiles)
    total = sum(c.count * (chosen[c.name].samples or 0) for c in cluster.classes)
    if total != cluster.num_ranks * captured:
        shares = " + ".join(f"{c.count} x {chosen[c.name].samples}" for c in cluster.classes)
        raise FormatError(
            f"the shares {shares} make {total} samples a step, not the {cluster.num_ranks * captured} of "
            f"{cluster.num_ranks} ranks with {captured} each; choose shares that keep the batch"
        )
    if cluster.num_ranks == 1:
        raise FormatError("levers are for several ranks, and this cluster has one; leave them off")
    for c in cluster.classes:
        if other is not None and c.name in other.profiles:
            other.profiles[c.name].check_class(c)
    known = {} if known is None else known
    for name, entry in chosen.items():
        if (name, entry) not in known:
            known[name, entry] = profile_under(graph, profiles[name], entry, other, cluster[name].device)
    return {name: known[name, entry] for name, entry in chosen.items()}


def profile_under(
    graph: OpGraph, profile: Profile, levers: ClassLevers, other: Recapture | None, device: str
) -> Profile:
    """Return the profile of one class under its levers, independent of other classes' levers."""
    captured = samples_of(graph)
    samples = levers.samples or captured
    if samples % levers.passes:
        raise FormatError(
            f"the {samples} samples of {profile.device_class} cannot be taken in {levers.passes} passes of "
            f"equal size; choose a divisor of {samples}"
        )
    size, at = samples // levers.passes, graph
    found = profile
    if size != captured:
        if other is None:
            raise MismatchError(
                f"{profile.device_class} is to take {size} samples in one pass, {graph.model} was captured "
                f"with {captured} alone; capture it (and profile it) once more, with another number"
            )
        at = resized(graph, other.graph, size)
        found = at_samples(profile, graph, other, size, at, loaded=samples)
    elif samples != captured:  # several passes as large as the captured one
        found = replace(profile, loading_s=profile.loading_s * samples / captured)
    setting = CarriedTo(at, samples, graph.shapes_hash, captured, levers, (at, found))
    return recomputing(graph, replace(found, setting=setting), levers.recomputed, device)


def recomputing(graph: OpGraph, profile: Profile, paths: Sequence[str], device: str) -> Profile:
    """Return a class's profile with these blocks recomputed; its other levers stay.

    `paths` replace the blocks that the profile recomputes.

    >>> recomputing(graph, profile, ["layers.0", "layers.5"], "cpu").setting.graph.recomputed
    """
    if profile.setting is None:
        levers = ClassLevers(samples_of(graph), recomputed=tuple(paths))
        return profile_under(graph, profile, levers, None, device)
    levers = replace(profile.setting.levers, recomputed=tuple(paths))
    at = mark_recomputed(profile.setting.one_pass[0], paths)
    found = replace(
        _in_passes(profile.setting.one_pass[1], at, levers.passes, device),
        optimizer_s=profile.optimizer_s,  # of a divided state, as its exchange and workspace
        optimizer_workspace_bytes=profile.optimizer_workspace_bytes,
    )
    setting = replace(profile.setting, graph=with_other_passes(at, levers.passes), levers=levers)
    return replace(found, setting=setting)


def _in_passes(profile: Profile, graph: OpGraph, passes: int, device: str) -> Profile:
    """Return the profile of a step of `passes` passes of a graph, with its recomputed blocks."""
    is_kept = keeps_weight_casts(device)
    found = in_passes(with_recomputation(profile, graph, is_kept), graph, passes, is_kept)
    if profile.launches:  # GPUs only
        launches = with_recomputation(profile.launches, graph, is_kept)
        found = replace(found, launches=in_passes(launches, graph, passes, is_kept))
    return found

"""The verdict on a plan: its samples per second, beside other ways to use the cards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from qsync.allocator.levers.shares import PASSES, BatchShares
from qsync.allocator.planner import Options, allocate, as_plan, fastest_state
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.uniform import strongest_of, uniform
from qsync.errors import InfeasibleError, QSyncError
from qsync.records.base import SIXTEEN_BIT, bases_of
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.levers import ACCUMULATE, SHARE, ClassLevers, samples_of
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.verdict import PLAN, Verdict, Way
from qsync.replayer import Recapture, profiles_under_levers, replay
from qsync.replayer.levers.apply import profile_under
from qsync.replayer.levers.batch_size import reach

_WORTH_SAYING = 1.03  # gain in samples per second from which shares are suggested
_LEVERS = (SHARE, ACCUMULATE)


def find_verdict(
    basis: Basis,
    plan: Plan,
    other: Recapture | None = None,
    options: Mapping[str, Any] | None = None,
    shares: BatchShares | None = None,
) -> Verdict | None:
    r"""Compare a plan's samples per second with other ways; None if all ranks are of one class.

    `other` is a capture of the model with another number of samples; without it shares are only estimated.
    `options` are the options of the plan, `shares` the search that chose its shares, if available. The
    strongest class alone takes the whole batch, or as much as its profiles cover. DDP is left out if equal
    batches do not fit. A 16-bit base is reported if it is faster than the plan's interval.

    >>> print("\n".join(find_verdict(basis, plan, other).lines()))
    """
    cluster = basis.cluster
    if len(cluster.classes) < 2:
        return None
    known = {field.name for field in fields(Options)}
    given = {name: value for name, value in (options or {}).items() if name in known}
    least = int((options or {}).get("least_samples", 1))
    base: dict[str, Any] = {"base": plan.base, "bucket_cap_bytes": plan.bucket_cap_bytes}
    plain = uniform(basis.graph, basis.profiles, cluster, {}, **base)
    strongest = strongest_of(plain)
    own = _way(PLAN, basis, plan, other)
    ways = [_alone(strongest, basis, other, base)]
    if _fits(plain, cluster):
        ways.append(_way(f"DDP, equal batches, {plan.base}", basis, plain))
    if shares is None and _has_samples(basis):
        shares = BatchShares(basis, other, _LEVERS, given, least)
    if shares is not None and other is not None:
        with suppress(InfeasibleError):
            by_speed = shares.best(lower=False).levers
            profiles = profiles_under_levers(basis.graph, basis.profiles, cluster, by_speed, other)
            shared = uniform(basis.graph, profiles, cluster, {}, **base)
            ways.append(_way(f"shares by speed, {plan.base}", basis, shared, other))
    if _has_shares(plan):
        with suppress(InfeasibleError):
            ways.append(_way("precisions, equal batches", basis, _fastest(basis, Options(**given))))
    times, leave_out = {}, []
    for name in (c.name for c in cluster.classes if c.name != strongest):
        without = ways[0] if len(cluster.classes) == 2 else _without(name, basis, other, given)
        if without is not None:
            times[name] = own.samples_per_s / without.samples_per_s
            leave_out += [name] if own.least <= without.samples_per_s else []
    with_shares = None
    if shares is not None and other is None:
        about = shares.about()
        with_shares = about if about > _WORTH_SAYING * own.samples_per_s else None
    lower_base = None
    if plan.base not in SIXTEEN_BIT:
        lower_base = _in_16_bits(strongest, basis, other if _has_shares(plan) else None, given, least)
    if lower_base is not None and lower_base.samples_per_s <= own.most:
        lower_base = None
    return Verdict((*ways, own), times, tuple(leave_out), with_shares, lower_base)


def _has_shares(plan: Plan) -> bool:
    return plan.levers is not None and bool(plan.levers.used)


def _in_16_bits(
    strongest: str, basis: Basis, other: Recapture | None, given: Mapping[str, Any], least: int
) -> Way | None:
    """Return the fastest way with the strongest class's 16-bit base; None if the class has none."""
    of_strongest, profile = basis.cluster[strongest], basis.profiles[strongest]
    profiled = {p for op in basis.graph.adjustable for p in profile.precisions_of(op.name)}
    bases = bases_of(of_strongest.device, of_strongest.precisions)
    base = next((p for p in bases if p in SIXTEEN_BIT and p in profiled), None)
    if base is None:
        return None
    with suppress(QSyncError):  # e.g. if the other base lacks a pinned precision
        given = {**given, "base": str(base), "target_s": None, "slack": None}
        if other is not None:
            step_s = BatchShares(basis, other, _LEVERS, given, least).best().step_s
        else:
            step_s = _fastest(basis, Options(**given)).step_s or math.inf
        return Way(str(base), _batch(basis) / step_s)
    return None


def _has_samples(basis: Basis) -> bool:
    with suppress(QSyncError):
        return samples_of(basis.graph) > 0
    return False


def _fastest(basis: Basis, given: Options) -> Plan:
    """Return the plan of the least step regardless of variance, far sooner than `allocate` does."""
    state = State(make_problem(basis.graph, basis.profiles, basis.sensitivity, basis.cluster, given))
    fastest_state(state, given)
    found = {name: one.lowering.assignment() for name, one in state.classes.items()}
    return as_plan(basis.graph, found, basis.profiles, basis.cluster, given)


def _fits(plan: Plan, cluster: Cluster) -> bool:
    found = {name: entry.predicted for name, entry in plan.classes.items()}
    return all(p is None or p.memory_bytes <= cluster[name].memory_bytes for name, p in found.items())


def _part(cluster: Cluster, classes: tuple[DeviceClass, ...]) -> Cluster:
    """Return the part of a cluster with these classes, on a proportional number of hosts."""
    hosts = len(cluster.hosts) * sum(c.count for c in classes) // cluster.num_ranks
    return cluster.with_classes(classes, max(1, hosts))


def alone_with_batch(
    name: str, basis: Basis, other: Recapture | None, base: Mapping[str, Any]
) -> tuple[Plan, Profile]:
    """Return the plan and profile of one class alone, with as much of the batch as profiled.

    `base` are options of `uniform`.
    """
    cluster, profile = _part(basis.cluster, (basis.cluster[name],)), basis.profiles[name]
    if other is not None and _has_samples(basis):
        (least, most), whole = reach(profile, basis.graph, other), _batch(basis) // cluster.num_ranks
        for passes in (k for k in PASSES if whole // k >= least):
            entry = ClassLevers(min(whole // passes, most) * passes, passes)
            found = profile_under(basis.graph, profile, entry, other, cluster[name].device)
            plan = uniform(basis.graph, {name: found}, cluster, {}, **base)
            if _fits(plan, cluster):  # more passes would be slower
                return plan, found
    return uniform(basis.graph, {name: profile}, cluster, {}, **base), profile


def _alone(name: str, basis: Basis, other: Recapture | None, base: Mapping[str, Any]) -> Way:
    """Return the rate of one class alone, with the whole batch as far as its profiles cover it."""
    cluster = _part(basis.cluster, (basis.cluster[name],))
    plan, profile = alone_with_batch(name, basis, other, base)
    samples = plan.levers_of(name).samples or _batch(basis) // basis.cluster.num_ranks
    at = replace(basis, profiles={name: profile})
    return _way(f"{cluster.num_ranks} x {name} alone", at, plan, cluster=cluster, samples=samples)


def _batch(basis: Basis) -> int:
    return basis.cluster.num_ranks * (samples_of(basis.graph) if _has_samples(basis) else 1)


def _way(
    name: str,
    basis: Basis,
    plan: Plan,
    other: Recapture | None = None,
    cluster: Cluster | None = None,
    samples: int | None = None,
) -> Way:
    """Return a plan's rate, optionally on a part of the cluster with `samples` samples per rank."""
    profiles: Mapping[str, Profile] = basis.profiles
    if plan.levers is not None and samples is None:
        profiles = profiles_under_levers(basis.graph, profiles, basis.cluster, plan.levers, other)
    at = cluster or basis.cluster
    profiles = {c.name: profiles[c.name] for c in at.classes}
    timeline = replay(basis.graph, plan, profiles, at, bucket_cap_bytes=plan.bucket_cap_bytes)
    samples = at.num_ranks * (samples or _batch(basis) // basis.cluster.num_ranks)
    rate, ends = samples / timeline.step_s, timeline.interval_s
    half = (ends[1] - ends[0]) / 2 / timeline.step_s if ends else 0.0
    return Way(name, rate, (rate / (1 + half), rate * (1 + half)) if ends else None)


def _without(name: str, basis: Basis, other: Recapture | None, given: Mapping[str, Any]) -> Way | None:
    """Return the rate of the best plan without a class; None if no plan is possible."""
    classes = tuple(c for c in basis.cluster.classes if c.name != name)
    rest = replace(basis, cluster=_part(basis.cluster, classes))
    rest = replace(rest, profiles={c.name: basis.profiles[c.name] for c in classes})
    try:
        if other is not None:
            return _way(f"without {name}", rest, BatchShares(rest, other, _LEVERS, given).plan(), other)
        plan = allocate(rest.graph, rest.profiles, rest.sensitivity, rest.cluster, **given)
        return _way(f"without {name}", rest, plan)
    except QSyncError:
        return None

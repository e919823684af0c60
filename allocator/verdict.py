"""What a plan is worth: samples per second beside the other ways to use the same cards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from qsync.allocator.levers.shares import BatchShares
from qsync.allocator.planner import Options, allocate
from qsync.allocator.uniform import uniform
from qsync.errors import InfeasibleError, QSyncError
from qsync.records.levers import ACCUMULATE, SHARE, samples_of
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.verdict import PLAN, Verdict, Way
from qsync.replayer import Recapture, profiles_under_levers, replay

_WORTH_SAYING = 1.03  # times the plan's samples per second, that shares must promise
_LEVERS = (SHARE, ACCUMULATE)


def find_verdict(
    basis: Basis, plan: Plan, other: Recapture | None = None, options: Mapping[str, Any] | None = None
) -> Verdict | None:
    r"""Return what the plan makes beside other ways; None where all ranks are of one class.

    `other` is the model captured with another number of samples; without it shares are only estimated.
    `options` are those that the plan was made with. The strongest class alone keeps its ranks' batches.

    >>> print("\n".join(find_verdict(basis, plan, other).lines()))
    """
    cluster = basis.cluster
    if len(cluster.classes) < 2:
        return None
    known = {field.name for field in fields(Options)}
    given = {name: value for name, value in (options or {}).items() if name in known}
    base: dict[str, Any] = {"base": plan.base, "bucket_cap_bytes": plan.bucket_cap_bytes}
    plain = uniform(basis.graph, basis.profiles, cluster, {}, **base)
    strongest = min(plain.classes, key=lambda name: _compute_s(plain, name))
    alone = replace(cluster, classes=(cluster[strongest],))
    of_alone = uniform(basis.graph, {strongest: basis.profiles[strongest]}, alone, {}, **base)
    own = _way(PLAN, basis, plan, other)
    ways = [
        _way(f"{alone.num_ranks} x {strongest} alone", replace(basis, cluster=alone), of_alone),
        _way(f"DDP, equal batches, {plan.base}", basis, plain),
    ]
    shares = BatchShares(basis, other, _LEVERS, given) if _has_samples(basis) else None
    if shares is not None and other is not None:
        with suppress(InfeasibleError):
            by_speed = shares.best(lower=False).levers
            profiles = profiles_under_levers(basis.graph, basis.profiles, cluster, by_speed, other)
            shared = uniform(basis.graph, profiles, cluster, {}, **base)
            ways.append(_way(f"shares by speed, {plan.base}", basis, shared, other))
    if plan.levers is not None and plan.levers.used:
        with suppress(InfeasibleError):
            equal = allocate(basis.graph, basis.profiles, basis.sensitivity, cluster, **given)
            ways.append(_way("precisions, equal batches", basis, equal))
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
    return Verdict((*ways, own), times, tuple(leave_out), with_shares)


def _compute_s(plan: Plan, name: str) -> float:
    predicted = plan[name].predicted
    assert predicted is not None, "it was just replayed"
    return predicted.compute_s


def _has_samples(basis: Basis) -> bool:
    with suppress(QSyncError):
        return samples_of(basis.graph) > 0
    return False


def _way(name: str, basis: Basis, plan: Plan, other: Recapture | None = None) -> Way:
    profiles: Mapping[str, Profile] = basis.profiles
    if plan.levers is not None:
        profiles = profiles_under_levers(basis.graph, profiles, basis.cluster, plan.levers, other)
    timeline = replay(basis.graph, plan, profiles, basis.cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    samples = basis.cluster.num_ranks * (samples_of(basis.graph) if _has_samples(basis) else 1)
    rate, ends = samples / timeline.step_s, timeline.interval_s
    half = (ends[1] - ends[0]) / 2 / timeline.step_s if ends else 0.0
    return Way(name, rate, (rate / (1 + half), rate * (1 + half)) if ends else None)


def _without(name: str, basis: Basis, other: Recapture | None, given: Mapping[str, Any]) -> Way | None:
    """Return the best plan without a class; None where there is none."""
    classes = tuple(c for c in basis.cluster.classes if c.name != name)
    rest = replace(basis, cluster=replace(basis.cluster, classes=classes))
    rest = replace(rest, profiles={c.name: basis.profiles[c.name] for c in classes})
    try:
        if other is not None:
            return _way(f"without {name}", rest, BatchShares(rest, other, _LEVERS, given).plan(), other)
        plan = allocate(rest.graph, rest.profiles, rest.sensitivity, rest.cluster, **given)
        return _way(f"without {name}", rest, plan)
    except QSyncError:
        return None

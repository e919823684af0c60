"""Every way to train with what replay predicts of it: before training, and again from the whole profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qsync import Cluster, OpGraph, Plan
from qsync.experiments.mixed.ways import ALONE, alone_of, lowered_fractions, ways
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.replayer import Recapture, Timeline, profiles_under_levers, replay


@dataclass(frozen=True, slots=True)
class Predicted:
    """One way to train: its plan, the cluster that it uses, and its step as replayed."""

    plan: Plan
    cluster: Cluster
    timeline: Timeline

    def again(self, basis: Basis, other: Recapture | None, alone: Profile | None) -> Predicted:
        """Replay the same plan from other profiles of the same classes, and their links."""
        names = list(self.plan.classes)
        cluster = basis.cluster if len(names) > 1 else alone_of(basis.cluster, names[0])
        return replayed(self.plan, cluster, basis, other, alone)

    def summary(self, graph: OpGraph, again: Timeline) -> dict[str, Any]:
        """Return the predicted part of a way's entry; `again` is replayed from the whole run's profile."""
        return {
            "predicted_step_s": again.step_s,
            "planned_step_s": self.timeline.step_s,
            "planned_interval_s": self.timeline.interval_s,
            "predicted_wait_fraction": {name: c.wait_fraction for name, c in again.classes.items()},
            "predicted_memory_bytes": {name: c.memory_bytes for name, c in again.classes.items()},
            "added_variance": self.plan.added_variance or 0.0,
            **lowered_fractions(graph, self.plan, self.cluster),
        }


def predicted_ways(
    basis: Basis,
    other: Recapture | None = None,
    *,
    num_steps: int = 0,
    alone: Profile | None = None,
    **options: Any,
) -> dict[str, Predicted]:
    """Plan and replay every way; intervals are of `num_steps` steps of each, in turns, after the profile.

    `options` are those of `ways`.
    """
    plans = ways(basis, other, alone=alone, **options)
    training_s = num_steps * sum(plan.step_s or 0.0 for plan in plans.values())
    ahead = replace(basis, profiles={name: p.ahead(training_s) for name, p in basis.profiles.items()})
    alone = alone.ahead(training_s) if alone is not None else None
    found = {}
    for way, plan in plans.items():
        cluster = alone_of(basis.cluster, next(iter(plan.classes))) if way == ALONE else basis.cluster
        found[way] = replayed(plan, cluster, ahead, other, alone)
    return found


def replayed(
    plan: Plan, cluster: Cluster, basis: Basis, other: Recapture | None, alone: Profile | None
) -> Predicted:
    """Replay a plan from the profiles with as many samples as it gives each class.

    One class on its own has the profile that was measured `alone`, if there is one.
    """
    profiles = basis.profiles
    if plan.levers is not None:
        profiles = profiles_under_levers(basis.graph, profiles, basis.cluster, plan.levers, other)
    if len(plan.classes) < len(basis.cluster.classes) and alone is not None:
        name = next(iter(plan.classes))
        profiles = {name: replace(alone, device_class=name)}
    used = {name: profiles[name] for name in plan.classes}
    timeline = replay(basis.graph, plan, used, cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    return Predicted(plan, cluster, timeline)

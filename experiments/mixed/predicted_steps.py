"""Predict every way to train by replay: before training, and again from the complete profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qsync import Cluster, OpGraph, Plan
from qsync.experiments.mixed.ways import alone_of, lowered_fractions, ways
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.replayer import Recapture, Timeline, profiles_under_levers, replay
from qsync.replayer.levers.apply import profile_under


@dataclass(frozen=True, slots=True)
class Predicted:
    """One way to train: its plan, its cluster, and its replayed step."""

    plan: Plan
    cluster: Cluster
    timeline: Timeline

    def summary(self, graph: OpGraph, again: Timeline) -> dict[str, Any]:
        """Return the predicted part of a way's entry; `again` uses the complete run's profile."""
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
    """Plan and replay every way; intervals hold for `num_steps` interleaved steps of each.

    `options` are those of `ways`.
    """
    plans = ways(basis, other, alone=alone, **options)
    training_s = num_steps * sum(plan.step_s or 0.0 for plan in plans.values())
    ahead = replace(basis, profiles={name: p.ahead(training_s) for name, p in basis.profiles.items()})
    alone = alone.ahead(training_s) if alone is not None else None
    return {way: replayed(plan, ahead, other, alone) for way, plan in plans.items()}


def replayed(plan: Plan, basis: Basis, other: Recapture | None, alone: Profile | None) -> Predicted:
    """Replay a plan with each class's planned number of samples.

    A cluster of one class uses the profile measured `alone`, if there is one.
    """
    profiles, name = basis.profiles, next(iter(plan.classes))
    cluster = basis.cluster if len(plan.classes) > 1 else alone_of(basis.cluster, name)
    if cluster is not basis.cluster:
        entry, device = plan.levers_of(name), cluster[name].device
        own = alone or profile_under(basis.graph, profiles[name], entry, other, device)
        profiles = {name: own}
    elif plan.levers is not None:
        profiles = profiles_under_levers(basis.graph, profiles, basis.cluster, plan.levers, other)
    used = {name: profiles[name] for name in plan.classes}
    timeline = replay(basis.graph, plan, used, cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    return Predicted(plan, cluster, timeline)

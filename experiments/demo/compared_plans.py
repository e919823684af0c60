"""The runs that the demo compares, as plans: what each device class runs, and what replay predicts for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qsync import Cluster, OpGraph, Plan, Precision
from qsync.allocator import allocate, search, uniform
from qsync.experiments.allocation.methods import next_up
from qsync.experiments.harness.ranks import ALONE, FAST, WEAK
from qsync.experiments.speedup.ways import every_share, has_int8_all, shared_by_speed
from qsync.records.levers import SHARE
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.replayer import Recapture, Timeline, profiles_under_levers, replay

# In a base of 16 bits "weak_int8_all" stands in the place of "weak_bf16", which is that of plain DDP.
# Where 16 bits are no faster than FP32, it stands beside it.
NAMES = ("fast_alone", "ddp", "lb_bsp", "weak_bf16", "weak_int8", "all_int8", "qsync", "qsync_share")
_ORDER = (*NAMES[:4], "weak_int8_all", *NAMES[4:])
_TITLES = {
    "fast_alone": "fast rank alone, {base} (the limit)",
    "ddp": "DDP, {base} everywhere",
    "lb_bsp": "LB-BSP, {base}: samples by speed",
    "weak_bf16": "weak rank all in 16 bits",
    "weak_int8": "weak rank all in INT8",
    "weak_int8_all": "weak rank, all products in INT8",
    "all_int8": "every rank in INT8",
    "qsync": "qsync plan",
    "qsync_share": "qsync plan, shares too",
}


def run_title(name: str, base: str = "fp32") -> str:
    """Return what a run is called in tables."""
    return _TITLES.get(name, name).format(base=base.upper())


@dataclass(frozen=True, slots=True)
class Planned:
    """One run: its plan, the cluster it is for, and the predicted step."""

    plan: Plan
    cluster: Cluster
    timeline: Timeline

    def summary(self, graph: OpGraph, again: Timeline) -> dict[str, Any]:
        """Return the predicted part of a run's entry; `again` is replayed from the whole run's profile."""
        variance = sum(c.predicted.added_variance for c in self.plan.classes.values() if c.predicted)
        return {
            "predicted_step_s": again.step_s,
            "planned_step_s": self.timeline.step_s,
            "planned_interval_s": self.timeline.interval_s,
            "predicted_wait_fraction": {name: c.wait_fraction for name, c in again.classes.items()},
            "predicted_memory_bytes": {name: c.memory_bytes for name, c in again.classes.items()},
            "added_variance": variance,
            **lowered_fractions(graph, self.plan, self.cluster),
        }


def planned_runs(
    basis: Basis,
    bucket_cap_bytes: int | None = None,
    base: Precision = Precision.FP32,
    other: Recapture | None = None,
    num_steps: int = 0,
) -> dict[str, Planned]:
    """Plan every run of the demo. Without a base of 16 bits the strong rank runs in FP32.

    Intervals are of `num_steps` steps of every run that follow the profile, in turns.

    Where no precision that a run is about was profiled, it would be plain DDP, and there is none.

    The weak class's 16-bit and 8-bit precisions stand for BF16 and INT8 where it has no such kernel. `other`
    is the model captured with another number of samples. LB-BSP takes the shares of the batch by which the
    predicted step is least, and the plan with shares is that of the lever `share`; without `other`, or where
    no share can change, there are no such runs.
    """
    alone = replace(basis.cluster, classes=(replace(basis.cluster[FAST], name=ALONE, count=1),))
    lowest, precision = "weak_bf16", next_up(basis.cluster, WEAK, Precision.BF16)
    if base is not Precision.FP32:
        lowest, precision = "weak_int8_all", Precision.INT8_ALL
    uniforms: dict[str, tuple[Cluster, Mapping[str, Precision]]] = {
        "fast_alone": (alone, {}),
        "ddp": (basis.cluster, {}),
        lowest: (basis.cluster, {WEAK: precision}),
        "weak_int8": (basis.cluster, {WEAK: Precision.INT8}),
        "all_int8": (basis.cluster, {WEAK: Precision.INT8, FAST: Precision.INT8}),
    }
    if has_int8_all(basis.profiles[WEAK]):
        uniforms["weak_int8_all"] = (basis.cluster, {WEAK: Precision.INT8_ALL})
    at = (basis.graph, basis.profiles)
    cap: dict[str, Any] = {"bucket_cap_bytes": bucket_cap_bytes}
    kept: dict[str, Any] = {"sensitivity": basis.sensitivity, "base": base, "strict": True, **cap}
    plans = {}
    for name, (cluster, precisions) in uniforms.items():
        plan = uniform(*at, cluster, precisions, **kept)
        if not precisions or any(plan[name_of_class].lowered for name_of_class in precisions):
            plans[name] = (cluster, plan)
    of_plan: dict[str, Any] = {"base": base, **cap}  # as `hybrid` plans
    to_plan = (*at, basis.sensitivity, basis.cluster)
    shares = list(every_share(basis, other)) if other else []
    if len(shares) > 1:
        plans["lb_bsp"] = (basis.cluster, shared_by_speed(basis, shares, **kept))
        shared = search(*to_plan, levers=[SHARE], other=other, **of_plan)
        plans["qsync_share"] = (basis.cluster, shared)
    plans["qsync"] = (basis.cluster, allocate(*to_plan, **of_plan))
    training_s = num_steps * sum(plan.step_s or 0.0 for _, plan in plans.values())
    ahead = replace(basis, profiles={name: p.ahead(training_s) for name, p in basis.profiles.items()})
    return {
        name: Planned(plan, cluster, replay(basis.graph, plan, _priced(ahead, plan, other), cluster, **cap))
        for name, (cluster, plan) in sorted(plans.items(), key=lambda one: _ORDER.index(one[0]))
    }


def replayed(
    planned: Mapping[str, Planned],
    basis: Basis,
    bucket_cap_bytes: int | None = None,
    other: Recapture | None = None,
) -> dict[str, Timeline]:
    """Replay the same plans from the profile and link of the whole training."""
    return {
        name: replay(
            basis.graph, entry.plan, _priced(basis, entry.plan, other),
            replace(entry.cluster, link=basis.cluster.link), bucket_cap_bytes=bucket_cap_bytes,
        )
        for name, entry in planned.items()
    }  # fmt: skip


def _priced(basis: Basis, plan: Plan, other: Recapture | None) -> Mapping[str, Profile]:
    """Return the profiles with as many samples as the plan gives each class."""
    if plan.levers is None:
        return basis.profiles
    return profiles_under_levers(basis.graph, basis.profiles, basis.cluster, plan.levers, other)


def lowered_fractions(graph: OpGraph, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Return which part of all adjustable operators, and of their FLOPs, is below the base, on all ranks."""
    flops = {op.name: op.flops for op in graph.adjustable}
    chosen = [
        (device_class.count, flops[op], op in lowered)
        for device_class in cluster.classes
        for lowered in (set(plan[device_class.name].lowered),)
        for op in plan[device_class.name].assignment
    ]
    num_ops, num_flops = sum(num for num, _, _ in chosen), sum(num * cost for num, cost, _ in chosen)
    return {
        "low_precision_op_fraction": sum(num for num, _, low in chosen if low) / max(num_ops, 1),
        "low_precision_flop_fraction": sum(n * cost for n, cost, low in chosen if low) / max(num_flops, 1),
    }

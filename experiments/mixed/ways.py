"""Build the ways to train on unequal ranks, each as a plan with its predicted step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import qsync
from qsync import Cluster, OpGraph, Plan, Precision
from qsync.allocator import allocate, uniform
from qsync.allocator.levers.shares import BatchShares
from qsync.allocator.uniform import strongest_of
from qsync.allocator.verdict import alone_with_batch
from qsync.errors import InfeasibleError
from qsync.experiments.allocation.methods import next_up
from qsync.records.levers import ACCUMULATE, SHARE
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.records.variant import variant_of
from qsync.replayer import Recapture, profiles_under_levers

ALONE, DDP, LB_BSP = "alone", "ddp", "lb_bsp"
WEAK_16, WEAK_INT8, WEAK_INT8_ALL, ALL_16, ALL_INT8 = UNIFORM = (
    "weak_16", "weak_int8", "weak_int8_all", "all_16", "all_int8",
)  # fmt: skip
QSYNC, QSYNC_SHARE, QSYNC_ALL = "qsync", "qsync_share", "qsync_all"
LOWERS_ALL = (ALL_16, ALL_INT8, QSYNC_ALL)  # the strong cards, too
# Titles for readers, in this order.
TITLES: Mapping[str, str] = {
    ALONE: "without the weak cards",
    DDP: "plain DDP",
    LB_BSP: "LB-BSP (shares by speed)",
    WEAK_16: "weak cards all in 16 bits",
    WEAK_INT8: "weak cards all in INT8",
    WEAK_INT8_ALL: "weak cards all in INT8, backward too",
    ALL_16: "every card in 16 bits",
    ALL_INT8: "every card in INT8",
    QSYNC: "qsync, equal batches",
    QSYNC_SHARE: "qsync",
    QSYNC_ALL: "qsync, every card lowered",
}
LEVERS = (SHARE, ACCUMULATE)  # the levers of a loader with a ShareSampler


def ways(
    basis: Basis,
    other: Recapture | None = None,
    *,
    base: Precision = Precision.FP32,
    bucket_cap_bytes: int | None = None,
    strong: str | None = None,
    alone: Profile | None = None,
    least_samples: int = 1,
) -> dict[str, Plan]:
    """Return each way as a plan; uniform choices without any profiled operator are left out.

    `other` is the model's graph captured with another number of samples; without it, or with one sample per
    rank, there are no shares. `strong` is the fastest class by default. `alone` is its profile with the whole
    batch while the others wait; by default it takes as much of the batch as its own profile reaches. 16 bits
    mean BF16, or FP16 if that is missing; a class without a precision uses the next higher one. LB-BSP uses
    the shares with the least predicted step, and lowers nothing. qsync is `qsync.hybrid`'s plan with a
    ShareSampler; with equal batches, the plan without one; with every card lowered, the plan of
    `lower_all=True`.
    """
    cluster, at = basis.cluster, (basis.graph, basis.profiles)
    given: dict[str, Any] = {"base": base, "bucket_cap_bytes": bucket_cap_bytes}
    kept = {**given, "sensitivity": basis.sensitivity, "strict": True}
    plain = uniform(*at, cluster, {}, **kept)
    strong = strong or strongest_of(plain)
    every = [c.name for c in cluster.classes]
    weak = [name for name in every if name != strong]
    if alone is not None:
        of_strong = uniform(basis.graph, {strong: alone}, alone_of(cluster, strong), {}, **kept)
    else:
        of_strong, _ = alone_with_batch(strong, basis, other, kept)
    found = {
        ALONE: of_strong,
        DDP: plain,
        **_uniform_choices(basis, weak, every, base, lambda chosen: uniform(*at, cluster, chosen, **kept)),
        QSYNC: allocate(*at, basis.sensitivity, cluster, **given),
    }
    if other is not None and basis.graph.batch_shapes[0][0] > 1:
        with suppress(InfeasibleError):  # a plan with equal batches fits, but no shares in the base do
            shares = BatchShares(basis, other, LEVERS, given, least_samples).best(lower=False).levers
            profiles = profiles_under_levers(*at, cluster, shares, other)
            found[LB_BSP] = uniform(basis.graph, profiles, cluster, {}, **kept)
        for way, every_card in ((QSYNC_SHARE, False), (QSYNC_ALL, True)):
            found[way] = qsync.plan(
                *at, basis.sensitivity, cluster, levers=LEVERS, other=other, least_samples=least_samples,
                lower_all=every_card, **given,
            )  # fmt: skip
    return {way: found[way] for way in TITLES if way in found}


def _uniform_choices(
    basis: Basis,
    weak: list[str],
    every: list[str],
    base: Precision,
    make: Callable[[Mapping[str, Precision]], Plan],
) -> dict[str, Plan]:
    """Return the plans that lower whole classes to one precision."""
    cluster = basis.cluster
    has_all = all(
        Precision.INT8_ALL in cluster[name].precisions and _has_int8_all(basis.profiles[name])
        for name in weak
    )
    lowest = Precision.INT8_ALL if has_all else Precision.INT8
    sixteen = {name: _sixteen_bits(cluster, name) for name in every}
    choices = {
        WEAK_INT8: {name: next_up(cluster, name, Precision.INT8) for name in weak},
        ALL_INT8: {name: next_up(cluster, name, lowest) for name in every},
    }
    if has_all:
        choices[WEAK_INT8_ALL] = dict.fromkeys(weak, Precision.INT8_ALL)
    if base is Precision.FP32:
        choices |= {WEAK_16: {name: sixteen[name] for name in weak}, ALL_16: sixteen}
    plans = {way: make(chosen) for way, chosen in choices.items()}
    return {way: plan for way, plan in plans.items() if any(plan[name].lowered for name in choices[way])}


def alone_of(cluster: Cluster, name: str) -> Cluster:
    """Return a cluster of one class."""
    return replace(cluster, classes=(cluster[name],))


def _sixteen_bits(cluster: Cluster, name: str) -> Precision:
    """Return BF16, FP16 on a class without it, or the next higher precision without both."""
    own = next((p for p in (Precision.BF16, Precision.FP16) if p in cluster[name].precisions), None)
    return own or next_up(cluster, name, Precision.BF16)


def _has_int8_all(profile: Profile) -> bool:
    """Return whether any operator was profiled in `int8_all`."""
    modes = {variant_of(key).mode for found in profile.ops.values() for key in found}
    return str(Precision.INT8_ALL) in modes


def samples_by_class(plan: Plan, samples: int) -> dict[str, int]:
    """Return the samples of each rank of a class; default: the profiled number."""
    return {name: plan.levers_of(name).samples or samples for name in plan.classes}


def first_alike(way: str, plans: Mapping[str, Plan]) -> str:
    """Return the first way with the same precisions, samples and passes as this one."""

    def runs(plan: Plan) -> Any:
        equal = plan.batch[0][0] if plan.batch else 0
        samples, passes = (
            samples_by_class(plan, equal),
            {name: plan.levers_of(name).passes for name in plan.classes},
        )
        return {name: own.assignment for name, own in plan.classes.items()}, samples, passes

    return next(other for other, plan in plans.items() if runs(plan) == runs(plans[way]))


def rate(plan: Plan, cluster: Cluster, samples: int, step_s: float | None = None) -> float:
    """Return a plan's samples per second over its classes, by its predicted or a given step."""
    taken = samples_by_class(plan, samples)
    total = sum(c.count * taken[c.name] for c in cluster.classes if c.name in taken)
    return total / (step_s or plan.step_s or 0.0)


def lowered_fractions(graph: OpGraph, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Return the fractions of adjustable operators, and of their FLOPs, below the base on all ranks."""
    flops = {op.name: op.flops for op in graph.adjustable}
    chosen = [
        (cluster[name].count, flops[op], op in own.lowered)
        for name, own in plan.classes.items() for op in own.assignment
    ]  # fmt: skip
    num_ops, num_flops = sum(num for num, _, _ in chosen), sum(num * cost for num, cost, _ in chosen)
    return {
        "low_precision_op_fraction": sum(num for num, _, low in chosen if low) / max(num_ops, 1),
        "low_precision_flop_fraction": sum(n * cost for n, cost, low in chosen if low) / max(num_flops, 1),
    }

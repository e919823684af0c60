"""The ways to train on a fast and a weak class of ranks, each as a plan with its predicted step. Pure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsync import Cluster, Plan, Precision
from qsync.allocator import allocate, uniform
from qsync.errors import InfeasibleError
from qsync.experiments.allocation.methods import next_up
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.replayer import Recapture, profiles_under_levers
from qsync.replayer.levers.batch_size import reach

ALONE, DDP, LB_BSP = "alone", "ddp", "lb_bsp"
WEAK_16, WEAK_INT8, ALL_16, ALL_INT8 = UNIFORM = ("weak_16", "weak_int8", "all_16", "all_int8")
QSYNC, QSYNC_SHARE, QSYNC_FASTEST = "qsync", "qsync_share", "qsync_fastest"
# What a reader sees of each.
TITLES: Mapping[str, str] = {
    ALONE: "without the weak cards",
    DDP: "plain DDP",
    LB_BSP: "LB-BSP (shares by speed)",
    WEAK_16: "weak cards all in 16 bits",
    WEAK_INT8: "weak cards all in INT8",
    ALL_16: "every card in 16 bits",
    ALL_INT8: "every card in INT8",
    QSYNC: "qsync",
    QSYNC_SHARE: "qsync, shares too",
    QSYNC_FASTEST: "qsync, shares too, fastest",
}
_SLACK, _ROUNDING, _MOST_SHARES = 0.02, 1e-6, 30


def ways(basis: Basis, other: Recapture) -> dict[str, Plan]:
    """Return each way as a plan; the basis has two classes, the fast one first.

    `other` is the model captured with another number of samples. 16 bits are BF16, or FP16 where that is
    missing; a class without them, or without INT8, takes the next one up. LB-BSP takes the shares whose
    predicted step is least. With shares too, qsync adds least variance at the better step of LB-BSP and of
    its own plan without shares; fastest, it adds least at the least step that any shares reach. Both try
    every share. INT8 is in all three products where those were profiled.
    """
    fast, weak = basis.cluster.classes
    at = (basis.graph, basis.profiles)
    kept: dict[str, Any] = {"sensitivity": basis.sensitivity, "strict": True}
    sixteen = {c.name: _sixteen_bits(basis.cluster, c.name) for c in (fast, weak)}
    offered = Precision.INT8_ALL in weak.precisions and has_int8_all(basis.profiles[weak.name])
    lowest = Precision.INT8_ALL if offered else Precision.INT8
    int8 = {c.name: next_up(basis.cluster, c.name, lowest) for c in (fast, weak)}
    alone = replace(basis.cluster, classes=(fast,))
    own = allocate(*at, basis.sensitivity, basis.cluster)
    shares = list(every_share(basis, other))
    by_speed = shared_by_speed(basis, shares, **kept)
    return {
        ALONE: uniform(basis.graph, {fast.name: basis.profiles[fast.name]}, alone, {}, **kept),
        DDP: uniform(*at, basis.cluster, {}, **kept),
        LB_BSP: by_speed,
        WEAK_16: uniform(*at, basis.cluster, {weak.name: sixteen[weak.name]}, **kept),
        WEAK_INT8: uniform(*at, basis.cluster, {weak.name: int8[weak.name]}, **kept),
        ALL_16: uniform(*at, basis.cluster, sixteen, **kept),
        ALL_INT8: uniform(*at, basis.cluster, int8, **kept),
        QSYNC: own,
        QSYNC_SHARE: _best(basis, shares, min(_step_s(own), _step_s(by_speed))),
        QSYNC_FASTEST: _best(basis, shares, (1 + _SLACK) * least_step_s(basis, shares)),
    }


def _sixteen_bits(cluster: Cluster, name: str) -> Precision:
    """Return BF16, FP16 on a class without it, or the next precision up where there is neither."""
    own = next((p for p in (Precision.BF16, Precision.FP16) if p in cluster[name].precisions), None)
    return own or next_up(cluster, name, Precision.BF16)


def shared_by_speed(basis: Basis, shares: Iterable[Mapping[str, Profile]], **kept: Any) -> Plan:
    """Return LB-BSP: no precision lowered, at the shares of the batch whose predicted step is least."""
    return min((uniform(basis.graph, each, basis.cluster, {}, **kept) for each in shares), key=_step_s)


def least_step_s(basis: Basis, shares: Iterable[Mapping[str, Profile]], base: str = "fp32") -> float:
    """Return the least step (seconds, predicted) that any shares reach with lowered precisions."""
    at = (basis.sensitivity, basis.cluster)
    found = [allocate(basis.graph, each, *at, base=base, slack=0.0).target_s for each in shares]
    return min(math.inf if target_s is None else target_s for target_s in found)


def has_int8_all(profile: Profile) -> bool:
    """Return whether any operator was profiled in `int8_all`."""
    modes = {mode.partition(" ")[0] for found in profile.ops.values() for mode in found}
    return str(Precision.INT8_ALL) in modes


def _best(basis: Basis, shares: Sequence[Mapping[str, Profile]], target_s: float) -> Plan:
    """Return the plan of least variance that reaches the target at any shares."""
    found = []
    for profiles in shares:
        with contextlib.suppress(InfeasibleError):
            found.append(allocate(
                basis.graph, profiles, basis.sensitivity, basis.cluster, target_s=target_s * (1 + _ROUNDING)
            ))  # fmt: skip
    return min(found, key=lambda plan: (plan.added_variance or 0.0, _step_s(plan)))


def _step_s(plan: Plan) -> float:
    assert plan.step_s is not None
    return plan.step_s


def every_share(basis: Basis, other: Recapture) -> Iterator[dict[str, Profile]]:
    """Yield the profiles of two classes at the shares of the batch that their costs reach, equal ones first.

    The samples of all ranks together stay the same. Of many shares, 30 or so are taken, evenly.
    """
    fast, weak = basis.cluster.classes
    equal = basis.graph.batch_shapes[0][0]
    samples = basis.cluster.num_ranks * equal
    ends = {c.name: reach(basis.profiles[c.name], basis.graph, other) for c in (fast, weak)}
    first, last = ends[weak.name]
    able = [
        (of_fast, of_weak)
        for of_weak in range(first, last + 1)
        for of_fast, rest in (divmod(samples - weak.count * of_weak, fast.count),)
        if not rest and ends[fast.name][0] <= of_fast <= ends[fast.name][1]
    ]
    every = -(-len(able) // _MOST_SHARES)
    for of_fast, of_weak in dict.fromkeys([(equal, equal), *able[::every]]):
        levers = Levers({fast.name: ClassLevers(of_fast), weak.name: ClassLevers(of_weak)})
        yield profiles_under_levers(basis.graph, basis.profiles, basis.cluster, levers, other)


def samples_of(plan: Plan, samples: int) -> dict[str, int]:
    """Return the samples that each rank of a class takes; so many were profiled."""
    return {name: plan.levers_of(name).samples or samples for name in plan.classes}


def first_alike(way: str, plans: Mapping[str, Plan]) -> str:
    """Return the first way whose plan runs as this one does: the same precisions, buckets and levers."""

    def runs(plan: Plan) -> Any:
        classes = [(name, own.assignment, plan.levers_of(name)) for name, own in plan.classes.items()]
        return classes, plan.bucket_cap_bytes

    return next(other for other, plan in plans.items() if runs(plan) == runs(plans[way]))


def rate(plan: Plan, cluster: Cluster, samples: int, step_s: float | None = None) -> float:
    """Return the samples per second of a plan: all classes' that it has, by its predicted or this step."""
    taken = samples_of(plan, samples)
    total = sum(c.count * taken[c.name] for c in cluster.classes if c.name in taken)
    return total / (step_s or _step_s(plan))

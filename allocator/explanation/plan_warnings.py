"""Warnings about a plan: gains within noise, untried gains, and effects outside all predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync.operators.precision import Precision
from qsync.records.base import base_of, is_below
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import ACCUMULATE, SHARE
from qsync.records.plans import ClassPlan, Plan
from qsync.records.profiles import CARRIED, LEARNED, MEASURED, Profile
from qsync.replayer import replay
from qsync.replayer.check_records import checked_lowerings
from qsync.replayer.communication import order_hint

# Advice: a restart reuses the cached profiles of its folder, so profiling again needs another folder.
AGAIN = "profile again, with cache_dir= another folder,"
UNSTEADY = 0.05  # of a step: noise or drift above this shows a busy machine


def find_warnings(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    budgets: Mapping[str, int] | None = None,
) -> list[str]:
    """Return a sentence for each reason to doubt a plan, by simulation.

    Lowering should save more seconds than the uncertainty of the predicted step, which contains nine runs in
    ten (`hidden_by_noise`). If it saves less, the profiles do not show that the plan saves any time.

    >>> find_warnings(graph, plan, profiles, cluster)
    []
    """
    norms = [op.name for op in graph.ops if op.kind == "batch_norm"]
    used = set(plan.levers.used) & {SHARE, ACCUMULATE} if plan.levers else set()
    found = [
        f"{norms[0]} and the other batch norms take their statistics over the samples of one rank and pass, "
        f"which the plan changes ({' and '.join(sorted(used))}); leave them out of levers=, or train with "
        "SyncBatchNorm"
    ] if norms and used else []  # fmt: skip
    found += _rounded_for_backward(graph, plan, profiles, cluster)
    found += _worth_asking_for(plan, profiles, cluster)
    found += [hint] if (hint := order_hint(cluster)) else []
    if plan.kept_base:
        return [*found, plan.kept_base]
    if not any(entry.lowered for entry in plan.classes.values()):
        return found
    if hidden := hidden_by_noise(graph, plan, profiles, cluster, budgets):
        return [*found, f"{hidden}; {AGAIN} on a quieter machine or for longer (QSYNC_PROFILE_S=120)"]
    return found + [doubt for each in cluster.classes if (doubt := _doubt(profiles[each.name]))]


def _doubt(profile: Profile) -> str:
    """Return a reason to doubt a profile (busy machine, few steps, no launches), or an empty text."""
    if (
        profile.origin in (LEARNED, CARRIED)
        and not profile.launches
        and profile.machine.get("device") == "cuda"
    ):
        return (
            f"no model prices launches, so {profile.device_class} waits for its host in no prediction, and "
            "steps of short kernels take longer; profile this shape by qsync.profile"
        )
    if profile.origin != MEASURED:
        return ""
    if profile.held_down:
        return (
            f"the clock of {profile.device_class} was held down by {' and '.join(profile.held_down)} during "
            f"its profile, so its times are a hot card's; {AGAIN} once it is cooler"
        )
    unsteady = max(profile.noise, profile.drift)
    if unsteady > UNSTEADY:
        return (
            f"the profile of {profile.device_class} was taken on a busy machine: its steps differ by "
            f"{unsteady:.0%}; {AGAIN} when nothing else runs"
        )
    if profile.num_steps and not profile.noise:
        return (
            f"the profile of {profile.device_class} saw most of its steps once, so its noise is unknown; "
            f"{AGAIN} for longer (QSYNC_PROFILE_S=120, in seconds)"
        )
    return ""


def _rounded_for_backward(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster
) -> list[str]:
    """Return a warning per class whose operators save 8-bit codes, which sensitivities do not cover."""
    if not any(entry.saving_less for entry in plan.classes.values()):
        return []
    found = []
    for name, lowering in checked_lowerings(graph, plan, profiles, cluster).items():
        coded = [op.name for i, op in enumerate(graph.ops) if lowering.form(i) == "codes"]
        if coded:
            more = f" and {len(coded) - 1} more" if len(coded) > 1 else ""
            found.append(
                f"{coded[0]}{more} keep eight-bit codes for backward on {name}, and what that adds to the "
                "gradient's variance is in no prediction; where it matters, name fewer in saving_less="
            )
    return found


def _worth_asking_for(plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster) -> list[str]:
    """Suggest profiling `int8_all` if no measured lower precision speeds up the slowest class.

    Processors that multiply 16 bits no faster than FP32 are such classes, as `int8` has 16-bit gradients.
    """
    fp32_s = {c.name: profiles[c.name].step_s.get(Precision.FP32, 0.0) for c in cluster.classes}
    slowest = max(cluster.classes, key=lambda c: fp32_s[c.name])
    measured = profiles[slowest.name].step_s
    below = [p for p in (Precision.BF16, Precision.FP16, Precision.INT8) if p in measured]
    if (
        len(cluster.classes) == 1
        or plan[slowest.name].lowered
        or Precision.INT8_ALL not in slowest.precisions
        or Precision.INT8_ALL in measured
        or not below
        or min(measured[p] for p in below) < fp32_s[slowest.name]
    ):
        return []
    return [
        f"{slowest.name} is no faster in {' or '.join(below)} than in FP32, so nothing is lowered there; "
        "int8_all multiplies gradients in INT8 too, rounded stochastically: to choose from it, give "
        'precisions=["int8_all"]'
    ]


def hidden_by_noise(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    budgets: Mapping[str, int] | None = None,
    plain_s: float | None = None,
) -> str:
    """Return a sentence if lowering saves less than the step's uncertainty; otherwise an empty text.

    `plain_s` is the step without lowering, if that step has other shares of the batch. Drift of the machine
    does not count, since it slows both steps alike. The text is also empty if operators lack a measurement in
    FP32, if the base does not fit in memory, and if the profiles state no error.
    """
    fp32 = all(
        Precision.FP32 in profiles[c.name].precisions_of(op.name)
        for c in cluster.classes
        for op in graph.adjustable
    )
    if not fp32 or not any(entry.lowered for entry in plan.classes.values()):
        return ""
    cap = plan.bucket_cap_bytes
    profiles = {name: replace(profile, drift=0.0) for name, profile in profiles.items()}
    base = {c.name: at_base(graph, plan[c.name], profiles[c.name]) for c in cluster.classes}
    plain = replay(graph, base, profiles, cluster, bucket_cap_bytes=cap)
    planned = replay(graph, plan, profiles, cluster, bucket_cap_bytes=cap)
    limits = {c.name: (budgets or {}).get(c.name, c.memory_bytes) for c in cluster.classes}
    if planned.interval_s is None or any(plain[name].memory_bytes > limit for name, limit in limits.items()):
        return ""
    plain_s = plain.step_s if plain_s is None else plain_s
    saved, half = plain_s - planned.step_s, (planned.interval_s[1] - planned.interval_s[0]) / 2
    if saved >= half:
        return ""
    return (
        f"the plan saves {saved * 1e3:.3g} ms of a step of {plain_s * 1e3:.4g} ms, and its step is only "
        f"known to within {half * 1e3:.3g} ms"
    )


def at_base(graph: OpGraph, plan: ClassPlan, profile: Profile) -> dict[str, Precision]:
    """Return a class's assignment with lower precisions replaced by its base (FP32 if not measured)."""
    base = {op.name: base_of(op, plan.base) for op in graph.adjustable}
    base = {op: p if p in profile.precisions_of(op) else Precision.FP32 for op, p in base.items()}
    return {op: base[op] if is_below(p, base[op]) else p for op, p in plan.assignment.items()}

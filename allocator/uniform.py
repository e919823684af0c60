"""Uniform plans for comparison: one precision on each class, wherever it is possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qsync.allocator.constraints import Constraints
from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.planner import as_plan
from qsync.errors import UnsupportedError
from qsync.lowering.incremental import Lowering
from qsync.operators.precision import Precision
from qsync.records.base import base_of, base_of_graph, base_on, bases_of, why_kept
from qsync.records.cluster import Cluster
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import supported_up
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import ClassCosts
from qsync.replayer.check_records import check_profiles


def uniform(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    precisions: Mapping[str, str | Precision],
    *,
    sensitivity: Sensitivity | None = None,
    bucket_cap_bytes: int | None = None,
    base: str | Precision | None = None,
    strict: bool = False,
) -> Plan:
    """Return the plan with one precision per class, raised for operators that lack it.

    Such an operator takes the next higher supported precision; without one below FP32 it takes the base.
    Unless `strict`, an operator also takes a higher precision if this is faster, by the profile with casts.

    Classes missing in `precisions` run in the base (FP32). The plan has predictions, and its variance if a
    sensitivity is given. Raises UnsupportedError if a class lacks its precision, MismatchError if graph and
    profiles do not match.

    >>> uniform(graph, profiles, cluster, {"infer": "int8"}).step_s
    """
    check_profiles(graph, profiles, cluster)
    assignments = {}
    for name in precisions:
        cluster[name]  # raises FormatError for an unknown class
    for device_class in cluster.classes:
        name = device_class.name
        own = base_on(base_of_graph(graph, base), bases_of(device_class.device, device_class.precisions))
        precision = Precision.parse(precisions.get(name, own))
        if precision not in device_class.precisions:
            known = ", ".join(device_class.precisions)
            raise UnsupportedError(f"{name} lacks {precision}, it has {known}; choose one of these")
        wanted = precision if name in precisions else None
        up = {op.name: _up(op, wanted, base_of(op, own), profiles[name]) for op in graph.adjustable}
        assignments[name] = {op: candidates[0] for op, candidates in up.items()}
        if wanted is not None and not strict:
            assignments[name] = _fastest(graph, up, profiles[name], device_class.carried_16bit)
    given = Constraints(bucket_cap_bytes=bucket_cap_bytes, base=base)
    return as_plan(graph, assignments, profiles, cluster, given, sensitivity=sensitivity)


def strongest_of(plain: Plan) -> str:
    """Return the class with the least predicted compute time under a plan without lowered operators."""
    compute_s = {name: own.predicted.compute_s for name, own in plain.classes.items() if own.predicted}
    return min(compute_s, key=lambda name: compute_s[name])


def _up(op: Op, wanted: Precision | None, base: Precision, profile: Profile) -> list[Precision]:
    """Return the supported precisions from `wanted` up, or from the base up if only FP32 is left."""
    measured = profile.precisions_of(op.name)
    missing = [p for p in Precision if p not in measured or why_kept(op, p)]
    half = "bf16" if Precision.BF16 in measured else None
    found = supported_up(op.kind, wanted or base, missing, half)
    if found[0] is not Precision.FP32 or wanted in (Precision.FP32, None):
        return found
    return supported_up(op.kind, base, missing, half)


def _fastest(
    graph: OpGraph, up: Mapping[str, Sequence[Precision]], profile: Profile, carried_16bit: str | None
) -> dict[str, Precision]:
    """Return an assignment from candidates: each operator's first, or one that shortens the step.

    Operators that share a cast change together first, then each operator alone.
    """
    lowering = Lowering(graph, {op: candidates[0] for op, candidates in up.items()}, carried_16bit)
    costs = ClassCosts(lowering, profile)
    for group in (*sibling_groups(graph, {op: tuple(own) for op, own in up.items()}), *zip(up)):
        for precision in up[group[0]][1:]:
            before_s = costs.total_s
            changes = [lowering.assign(op, precision) for op in group if precision in up[op]]
            costs.update(sorted({i for change in changes for i in change.touched}))
            if not costs.total_s < before_s:
                for change in reversed(changes):
                    lowering.undo(change)
                    costs.update(change.touched)
    return lowering.assignment()

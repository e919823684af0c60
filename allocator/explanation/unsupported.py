"""Report unsupported precisions of a plan's operators (reasons: `records/kernel_support`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsync.operators.precision import LARGEST, Precision
from qsync.operators.registry import PRECISIONS_BY_KIND, why_unwritten
from qsync.records.base import why_kept
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import is_fixed_despite_kernels, unsupported_by_shape
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.record_json import Record


@dataclass(frozen=True, slots=True)
class UnsupportedPrecision(Record):
    """One unsupported precision of an operator on a class, its actual precision, and the reason.

    If the operator's tensors fix its type, on all classes, `device_class` and `precision` are None.
    """

    op: str
    device_class: str | None
    precision: Precision | None
    runs_in: str
    why: str


def unsupported_precisions(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster
) -> list[UnsupportedPrecision]:
    """Return the unsupported precisions of every operator, class by class, in model order.

    Only precisions in which a class was profiled count. The result depends only on records: on shapes, the
    kind of device, and the precisions that failed during profiling.

    >>> for entry in unsupported_precisions(graph, plan, profiles, cluster):
    ...     print(entry.op, entry.precision, entry.why)
    """
    found = [
        UnsupportedPrecision(op.name, None, None, op.dtype, op.fixed_because)
        for op in graph.ops
        if is_fixed_despite_kernels(op)
    ]
    for device_class in cluster.classes:
        assignment = plan[device_class.name].assignment
        found += _of_class(graph, assignment, profiles[device_class.name], device_class)
    return found


def _of_class(
    graph: OpGraph, assignment: Mapping[str, Precision], profile: Profile, device_class: DeviceClass
) -> Iterator[UnsupportedPrecision]:
    measured = {op.name: set(profile.precisions_of(op.name)) for op in graph.adjustable}
    tried = set().union(*measured.values()) if measured else set()
    without_kernel = unsupported_by_shape(graph, device_class.device)
    for op in graph.adjustable:
        unsupported = {**profile.refused.get(op.name, {}), **without_kernel.get(op.name, {})}
        for precision in device_class.precisions:
            runs_in = str(assignment.get(op.name, Precision.FP32))
            kept = why_kept(op, precision) if runs_in != precision and precision in tried else ""
            is_known = precision in measured[op.name] or precision not in tried
            if precision not in unsupported and is_known and not kept:
                continue
            why = unsupported.get(precision) or kept or _why_not_measured(op, precision)
            yield UnsupportedPrecision(op.name, device_class.name, precision, runs_in, why)


def _why_not_measured(op: Op, precision: Precision) -> str:
    if precision not in PRECISIONS_BY_KIND[op.kind]:
        return f"{op.kind} in {precision}: {why_unwritten(op.kind, precision)}"
    if op.magnitude > LARGEST.get(precision, float("inf")):
        return f"it reads constants of up to {op.magnitude:.3g}, which {precision} does not hold"
    return "the profile has no time of it; profile this class again"

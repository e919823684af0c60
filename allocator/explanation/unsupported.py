"""What a plan could not lower, or not so far, and why: operators that no kernel serves in a precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import is_fixed_despite_kernels, unsupported_by_shape, why_unwritten
from qsync.records.plans import Plan
from qsync.records.precision import LARGEST, PRECISIONS_BY_KIND, Precision
from qsync.records.profiles import Profile


@dataclass(frozen=True, slots=True)
class Refusal:
    """One operator, one precision that it cannot have on a class, what it runs in instead, and why.

    An operator that is fixed for its tensors' sake has no class and no precision: it is so on all, in all.
    """

    op: str
    device_class: str | None
    precision: Precision | None
    runs_in: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def refusals(graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster) -> list[Refusal]:
    """Every operator that some precision was refused to, in the order of the model, class by class.

    The precisions looked at are those that a class was profiled in. From records alone: shapes, the kind of
    device, and what the profile says was refused where it was measured.

    >>> for refusal in refusals(graph, plan, profiles, cluster):
    ...     print(refusal.op, refusal.precision, refusal.why)
    """
    found = [
        Refusal(op.name, None, None, op.dtype, op.fixed_because)
        for op in graph.ops
        if is_fixed_despite_kernels(op)
    ]
    for device_class in cluster.classes:
        assignment = plan[device_class.name].assignment
        found += _of_class(graph, assignment, profiles[device_class.name], device_class)
    return found


def _of_class(
    graph: OpGraph, assignment: Mapping[str, Precision], profile: Profile, device_class: DeviceClass
) -> Iterator[Refusal]:
    measured = {op.name: set(profile.precisions_of(op.name)) for op in graph.adjustable}
    tried = set().union(*measured.values()) if measured else set()
    without = unsupported_by_shape(graph, device_class.device)
    for op in graph.adjustable:
        refused = {**profile.refused.get(op.name, {}), **without.get(op.name, {})}
        for precision in device_class.precisions:
            if precision not in refused and (precision in measured[op.name] or precision not in tried):
                continue
            why = refused.get(precision) or _why_not_measured(op, precision)
            runs_in = str(assignment.get(op.name, Precision.FP32))
            yield Refusal(op.name, device_class.name, precision, runs_in, why)


def _why_not_measured(op: Op, precision: Precision) -> str:
    if precision not in PRECISIONS_BY_KIND[op.kind]:
        return f"{op.kind} in {precision}: {why_unwritten(op.kind, precision)}"
    if op.magnitude > LARGEST.get(precision, float("inf")):
        return f"it reads constants of up to {op.magnitude:.3g}, which {precision} does not hold"
    return "the profile has no time of it; profile this class again"

"""Uniform plans, to compare with: one precision wherever it is possible."""

from __future__ import annotations

from collections.abc import Mapping

from qsync.allocator.planner import as_plan
from qsync.allocator.problem import Constraints
from qsync.errors import UnsupportedError
from qsync.records.base import base_of, base_of_graph, base_on, bases_of
from qsync.records.cluster import Cluster
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import first_precision_up
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer.simulate import check_profiles


def uniform(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    precisions: Mapping[str, str | Precision],
    *,
    sensitivity: Sensitivity | None = None,
    bucket_cap_bytes: int | None = None,
    base: str | Precision | None = None,
) -> Plan:
    """Return the plan that gives each class one precision, or the next one up that kind and profile have.

    An operator with none below FP32 has the base.

    Classes that `precisions` leaves out run in the base (FP32). The plan has its predictions, and its
    variance if a sensitivity is given. Raises UnsupportedError if a class lacks its precision, MismatchError
    if graph and profiles do not belong together.

    >>> uniform(graph, profiles, cluster, {"infer": "int8"}).step_s
    """
    check_profiles(graph, profiles, cluster)
    assignments = {}
    for name in precisions:
        cluster[name]  # FormatError for a class that is not there
    for device_class in cluster.classes:
        name = device_class.name
        own = base_on(base_of_graph(graph, base), bases_of(device_class.device, device_class.precisions))
        precision = Precision.parse(precisions.get(name, own))
        if precision not in device_class.precisions:
            known = ", ".join(device_class.precisions)
            raise UnsupportedError(f"{name} lacks {precision}, it has {known}; choose one of these")
        wanted = precision if name in precisions else None
        assignments[name] = {
            op.name: _measured(op, wanted, base_of(op, own), profiles[name]) for op in graph.adjustable
        }
    given = Constraints(bucket_cap_bytes=bucket_cap_bytes, base=base)
    return as_plan(graph, assignments, profiles, cluster, given, sensitivity=sensitivity)


def _measured(op: Op, wanted: Precision | None, base: Precision, profile: Profile) -> Precision:
    """Return the first precision from the wanted one up that the profile has, else the base, else FP32."""
    measured = profile.precisions_of(op.name)
    missing = [precision for precision in Precision if precision not in measured]
    half = "bf16" if Precision.BF16 in measured else None
    found = first_precision_up(op.kind, wanted or base, missing, half)
    if found is not Precision.FP32 or wanted in (Precision.FP32, None):
        return found
    return first_precision_up(op.kind, base, missing, half)

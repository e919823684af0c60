"""Uniform plans, to compare with: one precision wherever it is possible."""

from __future__ import annotations

from collections.abc import Mapping

from qsync.allocator.planner import as_plan
from qsync.allocator.problem import Constraints
from qsync.errors import UnsupportedError
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
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
) -> Plan:
    """Return the plan that gives each class one precision wherever kind and profile have it, else FP32.

    Classes that `precisions` leaves out run in FP32. The plan has its predictions, and its variance if a
    sensitivity is given. Raises UnsupportedError if a class lacks its precision, MismatchError if graph and
    profiles do not belong together.

    >>> uniform(graph, profiles, cluster, {"infer": "int8"}).step_s
    """
    check_profiles(graph, profiles, cluster)
    assignments = {}
    for name in precisions:
        cluster[name]  # FormatError for a class that is not there
    for device_class in cluster.classes:
        name = device_class.name
        precision = Precision.parse(precisions.get(name, Precision.FP32))
        if precision not in device_class.precisions:
            known = ", ".join(device_class.precisions)
            raise UnsupportedError(f"{name} lacks {precision}, it has {known}; choose one of these")
        assignments[name] = {
            op.name: precision
            if precision in PRECISIONS_BY_KIND[op.kind] and precision in profiles[name].precisions_of(op.name)
            else Precision.FP32
            for op in graph.adjustable
        }
    given = Constraints(bucket_cap_bytes=bucket_cap_bytes)
    return as_plan(graph, assignments, profiles, cluster, given, sensitivity=sensitivity)

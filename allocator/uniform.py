"""Uniform plans, to compare with: one precision wherever it is possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qsync.allocator.planner import as_plan
from qsync.allocator.problem import Constraints
from qsync.errors import UnsupportedError
from qsync.records.base import base_of, base_of_graph, base_on, bases_of
from qsync.records.cluster import Cluster
from qsync.records.graph import Op, OpGraph
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
    base: str | Precision | None = None,
) -> Plan:
    """Return the plan that gives each class one precision wherever kind and profile have it, else the base.

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
        wanted = (precision,) if name in precisions else ()
        assignments[name] = {
            op.name: _first_measured(op, (*wanted, base_of(op, own)), profiles[name])
            for op in graph.adjustable
        }
    given = Constraints(bucket_cap_bytes=bucket_cap_bytes, base=base)
    return as_plan(graph, assignments, profiles, cluster, given, sensitivity=sensitivity)


def _first_measured(op: Op, wanted: Sequence[Precision], profile: Profile) -> Precision:
    """Return the first of these precisions that the operator's kind and the profile have, else FP32."""
    able = set(PRECISIONS_BY_KIND[op.kind]) & set(profile.precisions_of(op.name))
    return next((precision for precision in wanted if precision in able), Precision.FP32)

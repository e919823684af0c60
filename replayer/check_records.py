"""Check that plan, graph, profiles and cluster match; lower and price every class."""

from __future__ import annotations

from collections.abc import Mapping

from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.lowering.incremental import Lowering
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import ClassLevers
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, check_versions
from qsync.records.save_less import ops_that_save_less
from qsync.replayer.costs.class_costs import ClassCosts


def costs_of_classes(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
) -> dict[str, ClassCosts]:
    """Return the costs of every class under a plan; raise if the records do not match."""
    return {
        name: ClassCosts(lowering, profiles[name])
        for name, lowering in checked_lowerings(graph, plan, profiles, cluster).items()
    }


def checked_lowerings(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
) -> dict[str, Lowering]:
    """Return the lowering of every class; raise if plan, graph, profiles and cluster do not match."""
    return {
        name: Lowering(profiles[name].graph_of(graph), assignment, cluster[name].carried_16bit, less)
        for name, assignment, less in checked_assignments(graph, plan, profiles, cluster)
    }


def checked_assignments(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
) -> list[tuple[str, Mapping[str, Precision], tuple[str, ...]]]:
    """Return (class, assignment, operators that save less) of each class; raise on a mismatch."""
    if isinstance(plan, Plan):
        plan.check_graph(graph)
    check_profiles(graph, profiles, cluster)
    if isinstance(plan, Plan):
        check_levers(plan, profiles)
    found = []
    for device_class in cluster.classes:
        name = device_class.name
        if not isinstance(plan, Plan) and name not in plan:
            known = ", ".join(map(str, plan)) or "none"
            raise MismatchError(
                f"no assignment for device class {name!r}; there is one for {shortened(known, quote=False)}"
            )
        assignment = plan[name].assignment if isinstance(plan, Plan) else plan[name]
        if not isinstance(assignment, Mapping) or not all(isinstance(p, str) for p in assignment.values()):
            raise FormatError(
                f"the assignment of {shortened(name)} must be a dict of operator -> precision, found "
                f"{shortened(assignment)}; give that"
            )
        if not set(assignment.values()) <= set(device_class.precisions):
            op, precision = next(
                entry for entry in assignment.items() if entry[1] not in device_class.precisions
            )
            known = ", ".join(device_class.precisions)
            raise UnsupportedError(
                f"{op} is to run in {precision} on {name}, which has only {known}; choose one of these"
            )
        if not set(map(type, assignment.values())) <= {Precision}:  # lowering compares by identity
            assignment = {op: Precision(p) for op, p in assignment.items()}
        if isinstance(plan, Plan) and plan[name].bitwise != profiles[name].bitwise:
            raise MismatchError(
                f"the plan and the profile of {name} differ in bitwise (FP32 by torch's own kernels, "
                "not by the fastest); profile and plan with the same"
            )
        at = profiles[name].graph_of(graph)
        less = ops_that_save_less(at, plan[name].saving_less) if isinstance(plan, Plan) else ()
        found.append((name, assignment, less))
    return found


def check_profiles(graph: OpGraph, profiles: Mapping[str, Profile], cluster: Cluster) -> None:
    """Raise MismatchError unless every class of the cluster has a profile of this graph."""
    for device_class in cluster.classes:
        if device_class.name not in profiles:
            known = ", ".join(profiles) or "none"
            raise MismatchError(
                f"no profile of device class {device_class.name!r} (there are: {known}); measure it with "
                "qsync.profile"
            )
        profiles[device_class.name].check_graph(graph)
        profiles[device_class.name].check_class(device_class)
    measured = {c.name: profiles[c.name].device_class for c in cluster.classes}
    for name, own in measured.items():
        # Class a may use the profile of class b only if b itself uses its own profile.
        if own != name and measured.get(own, own) != own:
            raise MismatchError(
                f"the profile of {shortened(own, quote=False)} is given as that of {shortened(name)}, and "
                f"{shortened(own)} has that of {shortened(measured[own], quote=False)}; give each profile "
                "under the name of its class"
            )
    check_versions({c.name: profiles[c.name] for c in cluster.classes})


def check_levers(plan: Plan, profiles: Mapping[str, Profile]) -> None:
    """Raise MismatchError unless the profiles were computed for the plan's levers."""
    for name, profile in profiles.items():
        planned = plan.levers_of(name)
        priced = profile.setting.levers if profile.setting else ClassLevers()
        if name in plan.classes and planned != priced:
            raise MismatchError(
                f"the plan gives {name} {planned}, its profile is for {priced}; carry the profiles over to "
                "the plan's levers (qsync.replayer.profiles_under_levers)"
            )

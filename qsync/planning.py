"""The public functions that need no model and no torch: they read records and return records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsync.allocator import allocate, check_options, search, uniform
from qsync.allocator.constraints import check_bucket_cap
from qsync.allocator.levers.search import DIVIDE_STATE
from qsync.errors import FormatError, shortened, unknown_name
from qsync.records.cluster import Cluster, Link
from qsync.records.graph import OpGraph
from qsync.records.json_files import check_kind
from qsync.records.levers import Levers
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import Timeline, profiles_under_levers
from qsync.replayer import replay as simulate
from qsync.replayer.levers.state_division import divided, spare_parts


def plan(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    levers: Sequence[str] = (),
    divide_state: bool = False,
    **options: Any,
) -> Plan:
    """Choose the precision of every operator on every device class.

    The plan adds the least gradient variance of all plans that reach the target step time and fit the memory.

    Args:
        graph: of the model (`qsync.capture`).
        profiles: device class -> its profile, for every class of the cluster.
        sensitivity: of the model (`qsync.sensitivity`).
        cluster: the device classes and the links between them.
        levers: further changes to search: any of "share", "accumulate", "buckets", "recompute" and
            "save_less".
        divide_state: divide the optimizer's state over the ranks, by the memory that each class has beyond
            the peak of one pass in the base; for `qsync.divide_optimizer`, which then reads its parts here.
        **options: options of `qsync.allocator.allocate`: `target_s` (seconds of a step) or `slack` (a
            fraction of the least step), `budgets` (class -> bytes), `pins` (pattern -> precision),
            `lower_all`, `margin`, `together`, `saving_less` (class -> patterns), `base` ("fp32", "tf32",
            "bf16" or "fp16"), `bucket_cap_bytes`, `gap` and `time_limit_s`. With `levers` also those of
            `qsync.allocator.search`: `other`, `least_samples` and `progress`.

    Returns:
        The plan, with predictions for every class, and a lower bound on the variance of any plan.

    Raises:
        InfeasibleError: nothing fits the memory or reaches the target; the message names the binding
            constraint and by how much it is missed.
        MismatchError: graph, profiles, sensitivity and cluster do not belong together.
        FormatError: an argument of another type, an invalid cluster, or an invalid option.

    Example:
        >>> plan = qsync.plan(graph, {"train": fast, "infer": slow}, sensitivity, cluster)
        >>> plan = qsync.plan(graph, profiles, sensitivity, cluster, levers=["buckets", "recompute"])
        >>> plan = qsync.plan(graph, profiles, sensitivity, cluster, saving_less={"infer": ["*"]})
    """
    _check_records(graph, profiles, cluster)
    check_kind(sensitivity, Sensitivity, "sensitivity", "qsync.sensitivity")
    check_options({**options, "levers": levers, DIVIDE_STATE: divide_state})
    if divide_state:
        return _divided_plan(graph, profiles, sensitivity, cluster, {**options, "levers": levers})
    if levers:
        return search(graph, profiles, sensitivity, cluster, levers=levers, **options)
    return allocate(graph, profiles, sensitivity, cluster, **options)


def _divided_plan(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    options: Mapping[str, Any],
) -> Plan:
    """Return the plan whose ranks hold parts of the optimizer's state.

    The parts are chosen first. The plan is then that of profiles without the other ranks' parts.
    """
    budgets = cluster.with_memory(options.get("budgets") or {})
    plain = uniform(graph, profiles, budgets, {}, base=options.get("base"))
    parts = spare_parts(graph, plain, profiles, budgets)
    own = {name: replace(one, setting=None) for name, one in divided(graph, profiles, cluster, parts).items()}
    found = plan(graph, own, sensitivity, cluster, **options)
    chosen = found.levers or Levers({})
    levers = replace(
        chosen, classes={name: replace(chosen[name], state_part=part) for name, part in parts.items()}
    )
    under = profiles_under_levers(graph, profiles, cluster, levers, options.get("other"))
    classes = {name: replace(one, profile_hash=under[name].hash) for name, one in found.classes.items()}
    return replace(found, levers=levers, classes=classes)


def replay(
    graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster, **options: Any
) -> Timeline:
    """Predict the time and memory of a step under a plan on every rank (simulated).

    Args:
        graph: of the model (`qsync.capture`).
        plan: a plan, or class -> operator -> precision.
        profiles: device class -> its profile, for every class of the cluster.
        cluster: the device classes and the links between them.
        **options: options of `qsync.replayer.replay`, such as `bucket_cap_bytes` (the size of DDP's buckets).

    Returns:
        The timeline: events, seconds of a step, and wait and memory peak (bytes) of every class.

    Raises:
        MismatchError: graph, plan, profiles and cluster do not belong together.
        FormatError: an argument of another type, or an invalid cluster.

    Example:
        >>> timeline = qsync.replay(graph, plan, profiles, cluster)
        >>> timeline.step_s, timeline["infer"].wait_s
    """
    _check_records(graph, profiles, cluster)
    check_kind(plan, (Plan, Mapping), "plan", "qsync.plan or qsync.Plan.load")
    for name in options:
        if name != "bucket_cap_bytes":
            raise FormatError(unknown_name(name, ("bucket_cap_bytes",)))
    check_bucket_cap(options.get("bucket_cap_bytes"))
    return simulate(graph, plan, profiles, cluster, **options)


def _check_records(graph: Any, profiles: Any, cluster: Any) -> None:
    """Raise FormatError for arguments of other types, and for an invalid cluster."""
    check_kind(graph, OpGraph, "graph", "qsync.capture")
    check_kind(profiles, Mapping, "profiles", "dict of class -> qsync.profile")
    for name, profile in profiles.items():
        check_kind(profile, Profile, f"profiles[{shortened(name)}]", "qsync.profile")
    check_kind(cluster, Cluster, "cluster", "qsync.Cluster.load")
    check_kind(cluster.link, Link, "the link of the cluster", "qsync.Link")
    Cluster.from_json(cluster.to_json())

"""The whole trade: what each step time costs in variance, from the least step to that of FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qsync.allocator.planner import allocate
from qsync.errors import FormatError
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity

# Of two plans the dearer must add this much more variance, as a part, to stand beside the slower one.
_MEANINGFUL = 1e-9


def frontier(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    num: int = 9,
    *,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Plan]:
    """Plans that no other one here beats in both step time and added variance, the fastest first.

    At `num` targets, evenly from the least step to the longest for which anything has to be lowered.
    `options` are those of `allocate`, but for `target_s` and `slack`. Raises FormatError for fewer than two
    points, and what `allocate` raises.

    >>> [(plan.step_s, plan.added_variance) for plan in frontier(graph, profiles, sensitivity, cluster)]
    """
    if num < 2:
        raise FormatError(f"a frontier has at least 2 points, found {num}; 9 is usual")
    for name in ("target_s", "slack"):
        if options.get(name):
            raise FormatError(f"a frontier goes through all targets; leave out {name}")
    progress(f"point 1 of {num}")
    least = allocate(graph, profiles, sensitivity, cluster, **options)
    # With all the time in the world only memory and pins lower anything.
    highest = allocate(graph, profiles, sensitivity, cluster, **{**options, "target_s": 1e6})
    assert least.step_s is not None and highest.step_s is not None
    plans = [least]
    for k in range(1, num - 1):
        progress(f"point {k + 1} of {num}")
        target_s = least.step_s + (highest.step_s - least.step_s) * k / (num - 1)
        if target_s > least.step_s:
            plans.append(allocate(graph, profiles, sensitivity, cluster, **{**options, "target_s": target_s}))
    return _undominated([*plans, highest])


def _undominated(plans: list[Plan]) -> list[Plan]:
    """The fastest plan first, then each that adds less variance than all before it."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_s, plan.added_variance)):
        variance, least = plan.added_variance, kept[-1].added_variance if kept else None
        assert variance is not None
        if least is None or variance < least * (1 - _MEANINGFUL):
            kept.append(plan)
    return kept

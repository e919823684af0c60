"""The trade-off between step time and added variance, from the least step to that of FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from qsync.allocator.planner import allocate
from qsync.errors import FormatError, InfeasibleError, shortened
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity

# A slower plan is kept if it adds less variance than every faster plan, by at least this fraction.
_MEANINGFUL = 1e-9
# Bisection of the target stops at this fraction of the difference between the least and FP32's step.
_PRECISION = 1e-3


_MOST_POINTS = 1000


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
    """Return the Pareto-optimal plans in step time and added variance, the fastest first.

    The `num` targets are evenly spaced from the least step to the shortest that needs no lowering for time.
    `options` are those of `allocate` except `target_s` and `slack`. Raises FormatError for fewer than two
    points; errors of `allocate` pass.

    >>> [(plan.step_s, plan.added_variance) for plan in frontier(graph, profiles, sensitivity, cluster)]
    """
    if type(num) is not int or not 2 <= num <= _MOST_POINTS:
        raise FormatError(
            f"a frontier has at least 2 points and at most {_MOST_POINTS}, found {shortened(num)}; 9 is usual"
        )
    for name in ("target_s", "slack"):
        if options.get(name):
            raise FormatError(f"a frontier goes through all targets; leave out {name}")
    progress(f"point 1 of {num}")
    least = allocate(graph, profiles, sensitivity, cluster, **{**options, "slack": 0.0})
    # Without a limit on time, only memory and pins lower operators.
    options = {**options, "slack": None}
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
    """Return the fastest plan, then each slower plan that adds less variance than all faster ones."""
    best: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_s, plan.added_variance)):
        variance, least = plan.added_variance, best[-1].added_variance if best else None
        assert variance is not None
        if least is None or variance < least * (1 - _MEANINGFUL):
            best.append(plan)
    return best


def fastest_within(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    max_variance: float,
    *,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Plan:
    """Return the fastest plan that adds at most `max_variance` (squared gradient norm).

    Targets are bisected, since a shorter step never adds less variance. The step is least to a thousandth of
    the difference between the fastest step and FP32's. `options` are those of `allocate` except `target_s`
    and `slack`. Raises FormatError for a negative or infinite variance. Raises InfeasibleError, with the
    excess, if pins or memory add more at any step time. Errors of `allocate` pass.

    >>> fastest_within(graph, profiles, sensitivity, cluster, max_variance=1e-4).step_s
    """
    if not 0.0 <= max_variance < math.inf:
        raise FormatError(
            f"the variance must not be negative or infinite, found {max_variance}; 0 lowers nothing"
        )
    for name in ("target_s", "slack"):
        if options.get(name):
            raise FormatError(f"the least step is looked for within a variance; leave out {name}")

    def planned(target_s: float | None) -> Plan:
        progress("least step" if target_s is None else f"a step of {target_s * 1e3:.4g} ms")
        target = {"target_s": target_s, "slack": 0.0 if target_s is None else None}
        return allocate(graph, profiles, sensitivity, cluster, **{**options, **target})

    fast, slow = planned(None), planned(1e6)
    if _adds(fast) <= max_variance:
        return fast
    if _adds(slow) > max_variance:
        raise InfeasibleError(
            f"no plan adds {max_variance:.6g} of variance or less: however long the step, pins and memory "
            f"add {_adds(slow):.6g}, {_adds(slow) - max_variance:.3g} too much; allow more, pin less or give "
            "the class more memory"
        )
    assert fast.step_s is not None and slow.step_s is not None
    low, high, best = fast.step_s, slow.step_s, slow
    enough = _PRECISION * (high - low)
    while high - low > enough:
        middle = (low + high) / 2
        plan = planned(middle)
        if _adds(plan) <= max_variance:
            # The plan's step may be shorter than its target.
            best, high = plan, min(middle, plan.step_s or middle)
        else:
            low = middle
    return best


def _adds(plan: Plan) -> float:
    assert plan.added_variance is not None
    return plan.added_variance

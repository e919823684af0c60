"""The trade-off between step time, added variance and memory, from the least step to that of the base."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsync.allocator.planner import Options, Start
from qsync.allocator.uniform import uniform
from qsync.errors import DoesNotFitError, FormatError, InfeasibleError, shortened
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import RECOMPUTE, SAVE_LESS
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity

# A plan is kept unless another is as good in every figure, up to this fraction.
_MEANINGFUL = 1e-9
# Bisection of the target stops at this fraction of the difference between the least and FP32's step.
_PRECISION = 1e-3
_MOST_POINTS = 1000
# With levers: budgets of the classes that may be lowered, of their peaks in the base.
_MEMORY_PARTS = (0.85, 0.7, 0.55, 0.4, 0.25)
_ANY_STEP_S = 1e6  # a target that every plan reaches


def frontier(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    num: int = 9,
    *,
    levers: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Plan]:
    """Return the Pareto-optimal plans in step time and added variance, the fastest first.

    The `num` targets are evenly spaced from the least step to the shortest that needs no lowering for time.
    With `levers` of blocks ("recompute", "save_less") plans also trade memory, the peaks of the classes that
    may be lowered: so many targets are planned for each of several budgets, of 85 % of these peaks in the
    base and less, until nothing fits. `options` are those of `allocate` except `target_s` and `slack`. Raises
    FormatError for fewer than two points and for other levers; errors of `allocate` pass.

    >>> [(plan.step_s, plan.added_variance) for plan in frontier(graph, profiles, sensitivity, cluster)]
    """
    if type(num) is not int or not 2 <= num <= _MOST_POINTS:
        raise FormatError(
            f"a frontier has at least 2 points and at most {_MOST_POINTS}, found {shortened(num)}; 9 is usual"
        )
    if other := [name for name in levers if name not in (RECOMPUTE, SAVE_LESS)]:
        raise FormatError(
            f"a frontier takes levers of blocks, {RECOMPUTE} and {SAVE_LESS}, found {shortened(other[0])}; "
            "leave it out"
        )
    given = _without_target(options, "a frontier goes through all targets")
    given = replace(given, block_levers=tuple(levers) or given.block_levers)
    progress("least step")
    start = Start(graph, profiles, sensitivity, cluster, given)
    plans = list(_several_targets(start, num, progress))
    base = uniform(graph, profiles, cluster, {}, base=given.base)
    lowerable = start.lowerable if levers else []
    peaks = {name: entry.memory_bytes for name in lowerable if (entry := base[name].predicted)}
    for part in _MEMORY_PARTS if peaks else ():
        tighter = {
            name: min(int(part * peak), (given.budgets or {}).get(name, cluster[name].memory_bytes))
            for name, peak in peaks.items()
        }
        budgets = {**(given.budgets or {}), **tighter}
        progress(f"least step in {part:.0%} of the memory")
        try:
            start = Start(graph, profiles, sensitivity, cluster, replace(given, budgets=budgets))
        except DoesNotFitError:
            break
        plans += _several_targets(start, num, progress)
    return _undominated(plans, tuple(peaks))


def _several_targets(start: Start, num: int, progress: Callable[[str], None]) -> Iterator[Plan]:
    """Yield the plans of a start for so many targets, from the least step to that of least variance."""
    least, highest = start.plan(slack=0.0), start.plan(_ANY_STEP_S)
    assert least.step_s is not None and highest.step_s is not None
    yield least
    for k in range(1, num - 1):
        progress(f"point {k + 1} of {num}")
        target_s = least.step_s + (highest.step_s - least.step_s) * k / (num - 1)
        if target_s > least.step_s:
            yield start.plan(target_s)
    yield highest


def _without_target(options: Mapping[str, Any], reason: str) -> Options:
    """Return options of `allocate` without a target; raise FormatError for one."""
    for name in ("target_s", "slack"):
        if options.get(name):
            raise FormatError(f"{reason}; leave out {name}")
    return Options(**{**options, "target_s": None, "slack": None})


def _undominated(plans: Sequence[Plan], classes: Sequence[str]) -> list[Plan]:
    """Return the plans, fastest first, that no other equals in step, variance and the peaks of classes."""
    best: list[tuple[float, ...]] = []
    found = []
    for plan in sorted(plans, key=lambda plan: _figures(plan, classes)):
        own = _figures(plan, classes)
        limits = [figure * (1 + _MEANINGFUL) for figure in own]
        if not any(all(map(float.__le__, other, limits)) for other in best):
            best.append(own)
            found.append(plan)
    return found


def _figures(plan: Plan, classes: Sequence[str]) -> tuple[float, ...]:
    entries = [plan[name].predicted for name in classes]
    peaks = [float(entry.memory_bytes) for entry in entries if entry is not None]
    return float(plan.step_s or 0.0), float(plan.added_variance or 0.0), *peaks


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
    given = _without_target(options, "the least step is looked for within a variance")
    start = Start(graph, profiles, sensitivity, cluster, given)

    def planned(target_s: float | None) -> Plan:
        progress("least step" if target_s is None else f"a step of {target_s * 1e3:.4g} ms")
        return start.plan(target_s, 0.0 if target_s is None else None)

    fast, slow = planned(None), planned(_ANY_STEP_S)
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

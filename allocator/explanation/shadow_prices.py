"""Shadow prices: the variance regained by more time or memory, and the next moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from qsync.allocator.explanation.plan_state import Alternative, alternative, state_of_plan
from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.search_state import State
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.record_json import Record

# Changes below this fraction of the class's compute time count as rounding.
_MEANINGFUL = 1e-9


@dataclass(frozen=True, slots=True)
class ShadowPrice(Record):
    """The variance that a class regains per second or byte, to first order, and its next moves.

    Prices come from single raises and lowerings: of one operator, or of all readers of one value (q, k, v).
    A price is None if no such change exists:

        variance_per_s     most variance regained per second of longer compute, of the raises that the target
                           alone forbids
        variance_per_byte  most variance regained per byte of a larger peak, of the raises that the memory
                           budget alone forbids
        next_raise         the raise that regains most per second beyond the target, of those that the target
                           alone forbids; without one, the raise that regains most per byte beyond the budget
        next_lowering      the lowering that adds least variance per second of shorter compute, whether or not
                           it shortens the step

    The prices are the marginal densities of the relaxed knapsack. Pinned operators do not change. A raise
    that no limit forbids does not count: it shows that the plan is not optimal, which `explain` reports.
    """

    device_class: str
    variance_per_s: float | None
    variance_per_byte: float | None
    next_raise: Alternative | None
    next_lowering: Alternative | None
    origin: str = "measured"  # origin of the class's costs (Profile.origin)


def shadow_prices(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
) -> list[ShadowPrice]:
    """Return the simulated shadow prices of a plan, in the order of the cluster's classes.

    Prices refer to the plan's target (its own step if it has none) and to each class's memory budget (the
    cluster's memory if the plan has none). Raises MismatchError or UnsupportedError if plan, graph, profiles,
    sensitivity and cluster do not belong together.

    >>> [price.next_raise.ops for price in shadow_prices(graph, plan, profiles, sensitivity, cluster)]
    """
    state, target_s = state_of_plan(graph, plan, profiles, sensitivity, cluster)
    return [_price(state, name, target_s, plan) for name in state.classes]


def _price(state: State, name: str, target_s: float, plan: Plan) -> ShadowPrice:
    one = state.classes[name]
    late, peak = state.late_factor(name), one.peak_bytes
    found = alternatives(state, name, target_s, plan)
    raises = [other for other in found if other.variance < 0]
    too_long = [other for other in raises if other.beyond_s > 0 and not other.beyond_bytes]
    too_large = [other for other in raises if not other.beyond_s and other.beyond_bytes > 0]
    least = _MEANINGFUL * one.costs.total_s
    shorter = [other for other in found if other.variance >= 0 and other.seconds < -least]
    longer = [-other.variance / (late * other.seconds) for other in too_long if other.seconds > least]
    larger = [
        -other.variance / (other.memory_bytes - peak) for other in too_large if other.memory_bytes > peak
    ]
    next_raise = min(too_long, key=lambda other: other.variance / other.beyond_s, default=None) or min(
        too_large, key=lambda other: other.variance / other.beyond_bytes, default=None
    )
    next_lowering = min(shorter, key=lambda other: other.variance / -other.seconds, default=None)
    return ShadowPrice(
        name, max(longer, default=None), max(larger, default=None), next_raise, next_lowering,
        one.part.profile.origin,
    )  # fmt: skip


def alternatives(state: State, name: str, target_s: float, plan: Plan) -> list[Alternative]:
    """Return every single change of precision of a class, except changes of pinned operators."""
    one = state.classes[name]
    pinned = {op for op in one.part.choices if plan.pinned_by(op, one.precision(op)) is not None}
    return [alternative(state, name, changed, target_s) for changed in _changes(state, name, pinned)]


def _changes(state: State, name: str, pinned: Collection[str]) -> Iterator[dict[str, Precision]]:
    """Yield every raise and lowering: of single operators, and of all readers of one value."""
    one = state.classes[name]

    choices = {op: options for op, options in one.part.choices.items() if op not in pinned}
    for op, options in choices.items():
        for precision in options:
            if precision is not one.precision(op):
                yield {op: precision}
    for group in sibling_groups(state.problem.graph, one.part.choices):
        for precision in one.part.choices[group[0]]:
            able = [
                op for op in group if precision in choices.get(op, ()) and precision is not one.precision(op)
            ]
            for same_sign in (
                [op for op in able if (one.added_by({op: precision}) < 0) is up] for up in (True, False)
            ):
                if len(same_sign) > 1:
                    yield dict.fromkeys(same_sign, precision)

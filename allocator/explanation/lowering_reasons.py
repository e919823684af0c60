"""Reasons: time saved and variance added by each lowered operator, and effects of raising it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync.allocator.explanation.plan_state import Alternative, alternative, state_of_plan
from qsync.allocator.search_state import State
from qsync.allocator.solvers.precision_recovery import TOLERANCE, is_raise
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.record_json import Record


@dataclass(frozen=True, slots=True)
class Reason(Record):
    """One lowered operator of one class, in seconds, bytes, and variance weighted n_c / N^2.

    `time_saved_s` are the seconds that the class saves against the base (FP32), including casts at the
    operator's edges. The `raised` fields hold for the next higher precision with all else unchanged: the
    step, the memory peak, and the variance regained.
    """

    op: str
    device_class: str
    precision: Precision
    time_saved_s: float
    added_variance: float
    raised_to: Precision
    step_if_raised_s: float
    memory_if_raised_bytes: int
    variance_regained: float
    verdict: str
    origin: str = "measured"  # origin of the class's costs (Profile.origin)


def explain(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
) -> list[Reason]:
    """Return one simulated reason for every lowered operator of a plan, class by class.

    Raises MismatchError or UnsupportedError if plan, graph, profiles, sensitivity and cluster do not belong
    together.

    >>> for reason in explain(graph, plan, profiles, sensitivity, cluster):
    ...     print(reason.verdict)
    """
    state, target_s = state_of_plan(graph, plan, profiles, sensitivity, cluster)
    return [
        _reason(state, name, op, target_s, plan.pinned_by(op, plan[name].assignment[op]))
        for name in state.classes
        for op in plan[name].lowered
    ]


def _reason(state: State, name: str, op: str, target_s: float, pinned_by: str | None) -> Reason:
    one = state.classes[name]
    first = one.part.first_of(op)  # the whole group is raised with `op`, and counts
    precision, variance, base = one.precision(op), one.part.variance[first], one.part.base[first]
    saved_s = alternative(state, name, {first: base}, target_s).seconds
    raised_to = next(p for p in one.part.choices[first] if is_raise(state, name, first, p))
    raised = alternative(state, name, {first: raised_to}, target_s)
    computed = one.lowering.computed_by(one.lowering.position[op])
    head = f"{op} runs in {precision} on {name}"
    head += f" with {computed} in its epilogue" if computed else ""
    costs = f"costs {-saved_s * 1e3:.3g} ms more than {base.upper()}"
    head += f", which saves {saved_s * 1e3:.3g} ms" if saved_s >= 0 else f", which {costs}"
    verdict = f"it is pinned to that by {pinned_by!r}" if pinned_by else _verdict(name, raised, target_s)
    return Reason(
        op, name, precision, saved_s, variance[precision], raised_to, raised.step_s, raised.memory_bytes,
        variance[precision] - variance[raised_to], f"{head}; {verdict}", one.part.profile.origin,
    )  # fmt: skip


def _verdict(name: str, raised: Alternative, target_s: float) -> str:
    """Return the constraint that forbids a raise, as a part of a sentence."""
    over_s = raised.step_s - target_s
    step = f"in {raised.precision} the step would take {raised.step_s * 1e3:.4g} ms"
    if over_s > target_s * TOLERANCE:
        return f"{step}, {over_s * 1e3:.3g} ms over the target"
    if raised.beyond_s > 0.0:
        return (
            f"{step}, within the target, but {raised.beyond_s * 1e3:.3g} ms over it whenever {name} is as "
            "late as the plan's margin allows for"
        )
    if raised.beyond_bytes > 0:
        more = f"{raised.beyond_bytes} bytes more than its memory budget"
        return f"in {raised.precision} the class would need {more}"
    return (
        f"it could run in {raised.precision}, and time and memory hold: it is pinned, or the plan is not best"
    )

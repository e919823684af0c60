"""Reasons: why each lowered operator is lowered, what lowering saves and adds, and what raising would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync.allocator.explanation.certificate import not_alike
from qsync.allocator.problem import Constraints, make_problem, with_chosen
from qsync.allocator.search_state import State
from qsync.allocator.solvers.precision_recovery import TOLERANCE, is_raise
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.record_json import Record
from qsync.replayer.check_records import checked_lowerings


@dataclass(frozen=True, slots=True)
class Reason(Record):
    """One lowered operator of one class. Seconds, bytes, and variance weighted n_c / N^2.

    `time_saved_s` are the seconds that the class saves against the base (FP32), with the casts of the
    neighbourhood. The `raised` fields hold for the next higher precision, everything else unchanged: the
    step, the memory peak, and the variance that would be regained.
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
    origin: str = "measured"  # of the class's costs: Profile.origin


@dataclass(frozen=True, slots=True)
class _Trial:
    """The effects of an operator's present precision, and of its next higher precision."""

    base: Precision
    saved_s: float
    raised_to: Precision
    step_s: float
    step_with_margin_s: float
    memory_bytes: int
    over_bytes: int


def explain(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    budgets: Mapping[str, int] | None = None,
    bucket_cap_bytes: int | None = None,
) -> list[Reason]:
    """Return one reason for every operator that the plan lowers, in the order of the model. Simulated.

    Raises MismatchError or UnsupportedError if plan, graph, profiles, sensitivity and cluster do not belong
    together.

    >>> for reason in explain(graph, plan, profiles, sensitivity, cluster):
    ...     print(reason.verdict)
    """
    state, target_s = state_of_plan(
        graph, plan, profiles, sensitivity, cluster, budgets=budgets, bucket_cap_bytes=bucket_cap_bytes
    )
    return [
        _reason(state, name, op, target_s, plan.pinned_by(op, plan[name].assignment[op]))
        for name in state.classes
        for op in plan[name].lowered
    ]


def state_of_plan(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    budgets: Mapping[str, int] | None = None,
    bucket_cap_bytes: int | None = None,
) -> tuple[State, float]:
    """Return the state that a plan describes, and its target in seconds (its own step if it has none).

    Budgets and bucket cap are those given, else the plan's own, else the cluster's memory and DDP's.
    Operators that the plan groups to run alike change together, unless an edited plan gives members of a
    group different precisions.
    """
    checked_lowerings(graph, plan, profiles, cluster)
    own = {c.name: plan.budgets[c.name] for c in cluster.classes if c.name in plan.budgets}
    given = Constraints(
        budgets={**own, **(budgets or {})},
        together=() if not_alike(graph, plan) else plan.together,
        bucket_cap_bytes=plan.bucket_cap_bytes if bucket_cap_bytes is None else bucket_cap_bytes,
        saving_less={c.name: plan[c.name].saving_less for c in cluster.classes},
        base=plan.base,
    )
    chosen = {name: own.assignment for name, own in plan.classes.items()}
    problem = make_problem(graph, profiles, sensitivity, cluster, given)
    state = State(with_chosen(problem, chosen, profiles, sensitivity, plan.base))
    state.restore({name: plan[name].assignment for name in state.classes})
    state.late = {name: plan[name].margin for name in state.classes}
    return state, state.step_s() if plan.target_s is None else plan.target_s


def _reason(state: State, name: str, op: str, target_s: float, pinned_by: str | None) -> Reason:
    one = state.classes[name]
    first = one.part.first_of(op)  # a raise of `op` raises its whole group, and all of the group counts
    precision, variance = one.precision(op), one.part.variance[first]
    trial = _trial(state, name, first)
    computed = one.lowering.computed_by(one.lowering.position[op])
    head = f"{op} runs in {precision} on {name}"
    head += f" with {computed} in its epilogue" if computed else ""
    return Reason(
        op, name, precision, trial.saved_s, variance[precision], trial.raised_to, trial.step_s,
        trial.memory_bytes, variance[precision] - variance[trial.raised_to],
        _verdict(head, name, trial, target_s, pinned_by), one.part.profile.origin,
    )  # fmt: skip


def _trial(state: State, name: str, op: str) -> _Trial:
    """Try an operator in its base and in its next higher precision; the state comes back unchanged."""
    one = state.classes[name]
    now_s = one.costs.total_s
    base = one.part.base[op]
    move = state.move(name, {op: base})
    saved_s = one.costs.total_s - now_s
    state.back(move)
    raised = next(p for p in one.part.choices[op] if is_raise(state, name, op, p))
    move = state.move(name, {op: raised})
    memory = one.peak_bytes
    found = _Trial(
        base, saved_s, raised, state.step_s(), state.late_step_s(), memory, memory - one.part.budget_bytes
    )
    state.back(move)
    return found


def _verdict(runs: str, name: str, trial: _Trial, target_s: float, pinned_by: str | None) -> str:
    saved_s, raised, step_s = trial.saved_s, trial.raised_to, trial.step_s
    costs = f"costs {-saved_s * 1e3:.3g} ms more than {trial.base.upper()}"
    gain = f"saves {saved_s * 1e3:.3g} ms" if saved_s >= 0 else costs
    head = f"{runs}, which {gain}"
    if pinned_by is not None:
        return f"{head}; it is pinned to that by {pinned_by!r}"
    over_s = step_s - target_s
    if over_s > target_s * TOLERANCE:
        step = f"{step_s * 1e3:.4g} ms, {over_s * 1e3:.3g} ms over the target"
        return f"{head}; in {raised} the step would take {step}"
    late_s = trial.step_with_margin_s
    if late_s > target_s * TOLERANCE + target_s:
        return (
            f"{head}; in {raised} the step would take {step_s * 1e3:.4g} ms, within the target, but "
            f"{(late_s - target_s) * 1e3:.3g} ms over it whenever {name} is as late as the plan's margin "
            "allows for"
        )
    if trial.over_bytes > 0:
        return (
            f"{head}; in {raised} the class would need {trial.over_bytes} bytes more than its memory budget"
        )
    return (
        f"{head}; it could run in {raised}, and time and memory hold: it is pinned, or the plan is not best"
    )

"""Why each lowered operator is lowered: what it saves, what it costs, and what raising it would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qsync.allocator.explanation.certificate import not_alike
from qsync.allocator.problem import Problem, pose
from qsync.allocator.solvers.recovery import TOLERANCE, is_raise
from qsync.allocator.state import State
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer.simulate import checked_lowerings


@dataclass(frozen=True, slots=True)
class Reason:
    """One lowered operator of one class. Seconds, bytes, and variance weighted n_c / N^2.

    `time_saved_s` is what the class saves by not running it in FP32, casts of its neighbourhood included. The
    `raised` fields are for the next higher precision, everything else as it is: the step, the memory peak,
    and the variance that would be regained.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    """One reason for every operator that the plan lowers, in the order of the model. Simulated.

    Raises MismatchError or UnsupportedError if plan, graph, profiles, sensitivity and cluster do not belong
    together.

    >>> for reason in explain(graph, plan, profiles, sensitivity, cluster):
    ...     print(reason.verdict)
    """
    state, target_s = as_planned(
        graph, plan, profiles, sensitivity, cluster, budgets=budgets, bucket_cap_bytes=bucket_cap_bytes
    )
    return [
        _reason(state, name, op, target_s, plan.pinned_by(op, plan[name].assignment[op]))
        for name in state.classes
        for op in plan[name].lowered
    ]


def as_planned(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    budgets: Mapping[str, int] | None = None,
    bucket_cap_bytes: int | None = None,
) -> tuple[State, float]:
    """The state that a plan describes, and its target in seconds (its own step if it has none).

    Budgets are those given, else the plan's own, else the cluster's memory. What the plan says runs alike
    changes together, unless somebody has parted it since.
    """
    checked_lowerings(graph, plan, profiles, cluster)
    own = {c.name: plan.budgets[c.name] for c in cluster.classes if c.name in plan.budgets}
    budgets = {**own, **(budgets or {})}
    problem = pose(
        graph, profiles, sensitivity, cluster, budgets=budgets, bucket_cap_bytes=bucket_cap_bytes,
        together=() if not_alike(graph, plan) else plan.together,
        saving_less={c.name: plan[c.name].saving_less for c in cluster.classes},
    )  # fmt: skip
    state = State(problem)
    strongest = min(state.classes, key=lambda name: state.classes[name].work.total_s)
    state.restore({name: plan[name].assignment for name in state.classes})
    state.late = {name: plan.margin or 0.0 for name in state.classes if name != strongest}
    return state, state.step_s() if plan.target_s is None else plan.target_s


def _reason(state: State, name: str, op: str, target_s: float, pinned_by: str | None) -> Reason:
    one = state.classes[name]
    first = one.part.first_of(op)  # what runs alike is raised with it, and counts with it
    precision, variance, now_s = one.precision(op), one.part.variance[first], one.costs.total_s
    move = state.move(name, {first: Precision.FP32})
    saved = one.costs.total_s - now_s
    state.back(move)
    computed = one.lowering.computed_by(one.lowering.position[op])
    head = f"{op} runs in {precision} on {name}"
    head += f" with {computed} in its epilogue" if computed else ""
    raised = next(p for p in one.part.choices[first] if is_raise(state, name, first, p))
    move = state.move(name, {first: raised})
    step_s, late_s, memory = state.step_s(), state.late_step_s(), one.peak_bytes
    state.back(move)
    verdict = _verdict(state.problem, name, head, raised, saved, step_s, late_s, memory, target_s, pinned_by)
    regained = variance[precision] - variance[raised]
    return Reason(
        op, name, precision, saved, variance[precision], raised, step_s, memory, regained, verdict,
        state.problem.classes[name].profile.origin,
    )  # fmt: skip


def _verdict(
    problem: Problem,
    name: str,
    runs: str,
    raised: Precision,
    saved_s: float,
    step_s: float,
    late_s: float,
    memory: int,
    target_s: float,
    pinned_by: str | None,
) -> str:
    gain = (
        f"saves {saved_s * 1e3:.3g} ms" if saved_s >= 0 else f"costs {-saved_s * 1e3:.3g} ms more than FP32"
    )
    head = f"{runs}, which {gain}"
    if pinned_by is not None:
        return f"{head}; it is pinned to that by {pinned_by!r}"
    over_s, over_bytes = step_s - target_s, memory - problem.classes[name].budget_bytes
    if over_s > target_s * TOLERANCE:
        step = f"{step_s * 1e3:.4g} ms, {over_s * 1e3:.3g} ms over the target"
        return f"{head}; in {raised} the step would take {step}"
    if late_s > target_s * TOLERANCE + target_s:
        return (
            f"{head}; in {raised} the step would take {step_s * 1e3:.4g} ms, within the target, but "
            f"{(late_s - target_s) * 1e3:.3g} ms over it whenever {name} is as late as the plan's margin "
            "allows for"
        )
    if over_bytes > 0:
        return f"{head}; in {raised} the class would need {over_bytes} bytes more than its memory budget"
    return (
        f"{head}; it could run in {raised}, and time and memory hold: it is pinned, or the plan is not best"
    )

"""The search state of a plan, and the effects of single changes of precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qsync.allocator.constraints import Constraints
from qsync.allocator.explanation.certificate import not_alike
from qsync.allocator.problem import make_problem, with_chosen
from qsync.allocator.search_state import State
from qsync.allocator.solvers.precision_recovery import TOLERANCE
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer.check_records import checked_assignments


@dataclass(frozen=True, slots=True)
class Alternative:
    """Operators of one class in another precision, with all else as planned.

    `variance` is the variance added (negative: regained), weighted n_c / N^2. `seconds` is the change of the
    class's compute time (negative: shorter), including casts at the operators' edges. `step_s` and
    `memory_bytes` are the resulting step and the class's peak. `beyond_s` is the excess over the target,
    including the plan's margin, and `beyond_bytes` the excess over the budget.
    """

    ops: tuple[str, ...]
    precision: Precision
    variance: float
    seconds: float
    step_s: float
    beyond_s: float
    memory_bytes: int
    beyond_bytes: int


def state_of_plan(
    graph: OpGraph,
    plan: Plan,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
) -> tuple[State, float]:
    """Return the search state of a plan, and its target in seconds (its own step if it has none).

    Operators of one group of the plan (`Plan.together`) change together, unless an edited plan gives members
    of a group different precisions.
    """
    checked_assignments(graph, plan, profiles, cluster)
    given = Constraints(
        budgets={c.name: plan.budgets[c.name] for c in cluster.classes if c.name in plan.budgets},
        together=() if not_alike(graph, plan) else plan.together,
        bucket_cap_bytes=plan.bucket_cap_bytes,
        saving_less={c.name: plan[c.name].saving_less for c in cluster.classes},
        base=plan.base,
    )
    chosen = {name: own.assignment for name, own in plan.classes.items()}
    cluster = replace(cluster, compression=plan.compression or cluster.compression)
    problem = make_problem(graph, profiles, sensitivity, cluster, given)
    state = State(with_chosen(problem, chosen, profiles, sensitivity, plan.base))
    state.restore({name: plan[name].assignment for name in state.classes})
    state.late = {name: plan[name].margin for name in state.classes}
    return state, state.step_s() if plan.target_s is None else plan.target_s


def alternative(state: State, name: str, changed: Mapping[str, Precision], target_s: float) -> Alternative:
    """Return the effect of other precisions of some operators; leave the state unchanged."""
    one = state.classes[name]
    variance = one.added_by(changed)
    before = one.costs.total_s
    move = state.move(name, changed)
    seconds, memory = one.costs.total_s - before, one.peak_bytes
    step_s, late_s = state.step_s(), state.late_step_s()
    state.back(move)
    return Alternative(
        tuple(one.part.with_partners(changed)), next(iter(changed.values())), variance, seconds, step_s,
        late_s - target_s if late_s > target_s * (1 + TOLERANCE) else 0.0,
        memory, max(0, memory - one.part.budget_bytes),
    )  # fmt: skip

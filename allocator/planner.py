"""Which operators run in which precision on each class: the problem posed, solved and replayed."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from qsync.allocator.problem import Problem, gradient_weight, pose
from qsync.allocator.solvers import milp
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.greedy import greedy
from qsync.allocator.solvers.recovery import TOLERANCE
from qsync.allocator.state import State
from qsync.errors import FormatError, InfeasibleError
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import Levers
from qsync.records.plans import ClassPlan, Plan, Predicted
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import replay

# How far from the least variance a plan may be before the exact solver looks further, and for how long.
GAP, TIME_LIMIT_S = 1e-3, 20.0
SOLVERS = ("milp", "greedy")


def allocate(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    target_s: float | None = None,
    slack: float = 0.0,
    budgets: Mapping[str, int] | None = None,
    pins: Mapping[str, str | Precision] | None = None,
    together: Sequence[Sequence[str]] = (),
    lower_all: bool = False,
    margin: float = 0.0,
    bucket_cap_bytes: int | None = None,
    saving_less: Mapping[str, Sequence[str]] | None = None,
    solver: str = "milp",
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
) -> Plan:
    """The plan that lowers just enough operators on just the weak classes that nobody waits.

        minimise sum over classes c of (n_c / N^2) sum over operators of omega   (design.md; QSync,
        arXiv:2407.02327) such that the step takes at most T and every class fits in its memory

    T is `target_s` (seconds) if given, else the least step the cluster reaches with its strongest class in
    FP32, times 1 + `slack`. The strongest class is the one whose FP32 step takes least; it is lowered only
    with `lower_all`, or where FP32 does not fit in its memory. `budgets` (bytes by class) take the place of
    the cluster's memory; `pins` map patterns of operator names to precisions, and `together` are patterns of
    operators that run alike (`qsync.allocator.op_groups.alike`). With `margin` the lowered classes reach the
    target even when their compute takes that part longer than predicted, as far as the fastest start allows:
    a step waits for whoever is late, and a class planned to the last millisecond is late at every other step
    (ours). `saving_less` maps classes to patterns of following operators that save less for backward
    (`Plan.save_less`): that takes the time and saves the memory that profile and memory model say.

    `solver` is "milp" (HiGHS, to within `gap` of the least variance or until `time_limit_s` is up) or
    "greedy" (QSync's two stages, exchanges, and windows where the bound leaves it open whether there is a
    better plan). The plan says below which variance none can fall (`Plan.bound`), with either. Raises
    InfeasibleError naming the binding constraint and by how much it is missed, MismatchError where graph,
    profiles, sensitivity and cluster do not belong together, and what `pose` raises.

    >>> plan = allocate(graph, {"train": fast, "infer": slow}, sensitivity, cluster, slack=0.02)
    """
    _check_options(target_s, slack, margin, solver, gap, time_limit_s)
    with _nothing_collected():
        problem = pose(
            graph, profiles, sensitivity, cluster, budgets=budgets, pins=pins, together=together,
            bucket_cap_bytes=bucket_cap_bytes, saving_less=saving_less,
        )  # fmt: skip
        state = State(problem)
        lowerable = _lowerable(state, lower_all)
        for name in lowerable:
            fastest_start(state, name)
        target = state.step_s() * (1 + slack) if target_s is None else target_s
        _check_reachable(state, target, lower_all)
        state.late = dict.fromkeys(lowerable, _affordable(state, lowerable, target, margin))
        greedy(state, lowerable, target)
        solved = milp.solve if solver == "milp" else milp.judge
        solution = solved(state, lowerable, target, gap=gap, time_limit_s=time_limit_s)
        plan = as_plan(
            graph, solution.assignments, profiles, cluster, problem=problem, target_s=target,
            bucket_cap_bytes=bucket_cap_bytes, saving_less=saving_less,
        )  # fmt: skip
    pinned = {pattern: Precision.parse(text) for pattern, text in (pins or {}).items()}
    return replace(
        plan, margin=margin or None, solver=solver, bound=solution.bound, status=solution.status,
        pins=pinned, budgets=budgets or {}, together=tuple(tuple(patterns) for patterns in together),
    )  # fmt: skip


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without Python's search for circles of objects, which finds none here and takes an eighth of the time
    (Llama-3-70B's graph on an AMD EPYC, greedy).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _check_options(
    target_s: float | None, slack: float, margin: float, solver: str, gap: float, time_limit_s: float
) -> None:
    """FormatError for what cannot be."""
    if not 0.0 <= slack < math.inf:
        raise FormatError(
            f"slack must not be negative or infinite, found {slack}; 0.05 allows steps 5 % longer than the "
            "least"
        )
    if not 0.0 <= margin < 1.0:
        raise FormatError(f"margin must be at least 0 and less than 1, found {margin}; 0.03 is usual")
    if target_s is not None and not 0.0 < target_s < math.inf:
        raise FormatError(f"the target must be positive and finite, found {target_s}; give seconds")
    if solver not in SOLVERS:
        raise FormatError(f"unknown solver {solver!r}: choose one of {', '.join(SOLVERS)}")
    if not 0.0 <= gap < 1.0:
        raise FormatError(f"the gap must be at least 0 and less than 1, found {gap}; {GAP} is usual")
    if not 0.0 < time_limit_s < math.inf:
        raise FormatError(f"the time limit must be positive and finite, found {time_limit_s}; give seconds")


def _affordable(state: State, lowerable: list[str], target_s: float, margin: float) -> float:
    """The margin, or the part of it that the fastest start can keep, to a thousandth."""

    def kept(part: float) -> bool:
        state.late = dict.fromkeys(lowerable, part)
        return state.late_step_s() <= target_s * (1 + TOLERANCE)

    if kept(margin):
        return margin
    low, high = 0.0, margin
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def as_plan(
    graph: OpGraph,
    assignments: Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    *,
    sensitivity: Sensitivity | None = None,
    problem: Problem | None = None,
    target_s: float | None = None,
    bucket_cap_bytes: int | None = None,
    saving_less: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """A plan of these assignments with what full replay predicts for it; no sensitivity, no variance."""
    chosen = {
        c.name: ClassPlan(
            {op.name: assignments[c.name].get(op.name, Precision.FP32) for op in graph.adjustable},
            profile_hash=profiles[c.name].hash,
            saving_less=tuple((saving_less or {}).get(c.name, ())),
            origin=profiles[c.name].origin,
        )
        for c in cluster.classes
    }
    carried = {name: profile.setting.levers for name, profile in profiles.items() if profile.setting}
    plan = Plan(
        graph.model, graph.hash, chosen, target_s=target_s, bucket_cap_bytes=bucket_cap_bytes,
        levers=Levers(carried) if carried else None,
    )  # fmt: skip
    timeline = replay(graph, plan, profiles, cluster, bucket_cap_bytes=bucket_cap_bytes)
    classes = {}
    for device_class in cluster.classes:
        name, weight = device_class.name, gradient_weight(device_class, profiles, cluster)
        assignment = chosen[name].assignment
        if problem is not None:
            variance = sum(problem.classes[name].variance[op][p] for op, p in assignment.items())
        else:
            variance = (
                weight * sum(sensitivity[op, p] for op, p in assignment.items()) if sensitivity else 0.0
            )
        entry = timeline[name]
        predicted = Predicted(entry.compute_s, entry.wait_s, entry.memory_bytes, variance)
        classes[name] = replace(chosen[name], predicted=predicted)
    return replace(plan, classes=classes, step_s=timeline.step_s)


def _lowerable(state: State, lower_all: bool) -> list[str]:
    """The weak classes: all but the one whose FP32 step takes least, if FP32 fits in its memory."""
    strongest = min(state.classes, key=lambda name: state.classes[name].work.total_s)
    return [name for name, one in state.classes.items() if lower_all or name != strongest or not one.fits()]


def _check_reachable(state: State, target_s: float, lower_all: bool) -> None:
    step_s = state.step_s()
    if step_s <= target_s * (1 + TOLERANCE):
        return
    slowest = max(state.classes, key=lambda name: state.classes[name].work.total_s)
    advice = (
        "give a longer target"
        if lower_all
        else "give a longer target, or let the strongest class be lowered too"
    )
    raise InfeasibleError(
        f"no plan reaches a step of {target_s:.6g} s: the fastest one takes {step_s:.6g} s, "
        f"{step_s - target_s:.3g} s too long, and {slowest} is the slowest class; {advice}"
    )

"""Plans: build the allocation problem, solve it, replay the solution."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from qsync.allocator.block_levers import LESS, RECOMPUTED, blocks_with
from qsync.allocator.constraints import Constraints
from qsync.allocator.explanation.plan_warnings import AGAIN, at_base, hidden_by_noise
from qsync.allocator.problem import added_variance, gradient_weight, make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers import milp
from qsync.allocator.solvers.fastest_start import fastest_starts, shorten_step
from qsync.allocator.solvers.precision_recovery import TOLERANCE
from qsync.errors import FormatError, InfeasibleError
from qsync.operators.precision import Precision
from qsync.records.base import base_of, base_of_graph, base_on, bases_of, check_base
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import Levers
from qsync.records.plans import ClassPlan, Plan, Predicted
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import replay
from qsync.replayer.levers.apply import recomputing

# The relative gap to the least variance at which the exact solver stops, and its time limit.
GAP, TIME_LIMIT_S = 1e-3, 20.0


@dataclass(frozen=True, slots=True)
class Options(Constraints):
    """All options of `allocate`: constraints of the problem, the target, and limits of the solver.

    `target_s` is the target step in seconds. If None, it is the least step that the cluster reaches with its
    strongest class in the base (FP32), times 1 + `slack`; at most one of the two may be given. The strongest
    class takes the least time per sample in the base. It is lowered only with `lower_all`, or if the base
    does not fit in its memory.

    If lowering saves less time than the profiles' uncertainty, and no target, slack, pins or memory require
    it, all operators run in the base, and `Plan.kept_base` states the reason.

    `slack` None means the error of the lowered classes' profiles (`Profile.error`), but no more than the
    strongest class waits: predictions cannot distinguish such steps, so the least variance decides.

    With `margin`, lowered classes reach the target even if their compute is longer than predicted by this
    fraction. A margin that the fastest start cannot keep is reduced. A step waits for its latest rank, so a
    class planned to the last millisecond would be late in every other step.

    HiGHS solves until the plan is within `gap` of the least variance, or for `time_limit_s`.
    """

    target_s: float | None = None
    slack: float | None = None
    lower_all: bool = False
    margin: float = 0.0
    gap: float = GAP
    time_limit_s: float = TIME_LIMIT_S

    @property
    def is_forced(self) -> bool:
        """Return whether an option (`lower_all`, target, slack, pins) requires lowered operators."""
        is_timed = self.target_s is not None or self.slack is not None
        return bool(self.lower_all or is_timed or self.pins)

    def check(self) -> None:
        """Raise FormatError for an option of a wrong type or out of its range."""
        self.check_kinds()
        if self.slack is not None and not 0.0 <= self.slack < math.inf:
            raise FormatError(
                f"slack must not be negative or infinite, found {self.slack}; 0.05 allows steps 5 % longer "
                "than the least"
            )
        if not 0.0 <= self.margin < 1.0:
            raise FormatError(
                f"margin must be at least 0 and less than 1, found {self.margin}; 0.03 is usual"
            )
        if self.target_s is not None and not 0.0 < self.target_s < math.inf:
            raise FormatError(f"the target must be positive and finite, found {self.target_s}; give seconds")
        if self.target_s is not None and self.slack is not None:
            raise FormatError("target_s says what slack adds to the least step; leave one of them out")
        if not 0.0 <= self.gap < 1.0:
            raise FormatError(f"the gap must be at least 0 and less than 1, found {self.gap}; {GAP} is usual")
        if not 0.0 < self.time_limit_s < math.inf:
            raise FormatError(
                f"the time limit must be positive and finite, found {self.time_limit_s}; give seconds"
            )


def allocate(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    **options: Any,
) -> Plan:
    """Return the plan of least added variance that reaches the target step and fits in memory.

        minimise    sum over classes c of (n_c / N^2) sum over operators of omega
        such that   the step takes at most T, and every class fits in its memory

    (QSync, IPDPS 2024, arXiv:2407.02327.)

    Args:
        graph: The operators of one step of the model.
        profiles: The profile of each device class, by name.
        sensitivity: Added gradient variance (squared gradient norm) by operator and precision.
        cluster: The device classes, their ranks and links.
        **options: Fields of `Options`: `target_s`, `slack`, `budgets`, `pins`, `together`, `lower_all`,
            `margin`, `bucket_cap_bytes`, `saving_less`, `block_levers`, `base`, `gap` and `time_limit_s`.

    Returns:
        The plan, with replay's predictions and a lower bound of the variance (`Plan.bound`).

    Raises:
        InfeasibleError: No plan meets the target or a budget. The message names the binding constraint and
            the excess over it.
        MismatchError: Graph, profiles, sensitivity and cluster do not belong together.
        FormatError: An option is out of its range.

    Example:
        >>> plan = allocate(graph, {"train": fast, "infer": slow}, sensitivity, cluster, slack=0.02)
    """
    given = Options(**options)
    return Start(graph, profiles, sensitivity, cluster, given).plan(given.target_s, given.slack)


class Start:
    """A problem at the fastest start of its classes, from which plans for several targets are solved.

    `lowerable` are the classes that may be lowered. Raises the errors of `allocate`.

    >>> start = Start(graph, profiles, sensitivity, cluster, Options(budgets={"infer": 2**34}))
    >>> [start.plan(target_s).added_variance for target_s in (0.1, 0.2)]
    """

    def __init__(
        self,
        graph: OpGraph,
        profiles: Mapping[str, Profile],
        sensitivity: Sensitivity,
        cluster: Cluster,
        given: Options,
    ) -> None:
        given.check()
        known = dict.fromkeys(p for c in cluster.classes for p in bases_of(c.device, c.precisions))
        check_base(base_of_graph(graph, given.base), known)
        self._graph, self._profiles, self._sensitivity = graph, profiles, sensitivity
        self._cluster, self._given = cluster, given
        with _without_garbage_collection():
            self._state = State(make_problem(graph, profiles, sensitivity, cluster, given))
            self.lowerable = fastest_state(self._state, given)
        self._fastest = self._state.assignments(), self._state.treatments()

    def plan(self, target_s: float | None = None, slack: float | None = None) -> Plan:
        """Return the plan of least variance for a target, or for the least step with slack (`Options`)."""
        given = replace(self._given, target_s=target_s, slack=slack)
        given.check()
        graph, cluster, sensitivity = self._graph, self._cluster, self._sensitivity
        with _without_garbage_collection():
            state = self._state
            state.restore(*self._fastest)
            target_s = _target_s(state, self.lowerable, slack) if target_s is None else target_s
            _check_reachable(state, self.lowerable, target_s, given.lower_all)
            margin = _affordable_margin(state, self.lowerable, target_s, given.margin)
            state.late = dict.fromkeys(self.lowerable, margin)
            solution = milp.solve(
                state, self.lowerable, target_s, gap=given.gap, time_limit_s=given.time_limit_s
            )
            profiles, chosen = _under_levers(state, self._profiles, given)
            plan = as_plan(
                graph, solution.assignments, profiles, cluster, chosen, target_s=target_s,
                sensitivity=sensitivity,
            )  # fmt: skip
            late = {
                name: replace(one, margin=state.late.get(name, 0.0)) for name, one in plan.classes.items()
            }
            plan = replace(plan, classes=late)
            if not given.is_forced and (
                hidden := hidden_by_noise(graph, plan, profiles, cluster, given.budgets)
            ):
                plan = _at_base(plan, hidden, graph, profiles, cluster, chosen, sensitivity)
                solution = replace(solution, bound=min(solution.bound, plan.added_variance or 0.0))
        return replace(
            plan, bound=solution.bound, status=solution.status,
            pins={pattern: Precision.parse(text) for pattern, text in (given.pins or {}).items()},
            budgets=given.budgets or {}, together=tuple(tuple(patterns) for patterns in given.together),
        )  # fmt: skip


def _under_levers(
    state: State, profiles: Mapping[str, Profile], given: Options
) -> tuple[Mapping[str, Profile], Options]:
    """Return the profiles under the levers of all blocks, and options with the operators that save less."""
    graph, found = state.problem.graph, dict(profiles)
    saving = {name: tuple(patterns) for name, patterns in (given.saving_less or {}).items()}
    for name, one in state.classes.items():
        less = blocks_with(state.plain(name).part.blocks, one.treatment, LESS)
        saving[name] = (*saving.get(name, ()), *(pattern for block in less for pattern in block.patterns))
        found[name] = one.part.profile if RECOMPUTED in one.treatment else profiles[name]
    if any(RECOMPUTED in one.treatment for one in state.classes.values()):
        for c in state.problem.cluster.classes:
            if found[c.name].setting is None:
                found[c.name] = recomputing(graph, found[c.name], (), c.device)
    return found, replace(given, saving_less=saving)


def fastest_state(state: State, given: Options) -> list[str]:
    """Move the classes that may be lowered to their fastest starts; return their names.

    Raises InfeasibleError if a class has no assignment that fits in its memory.
    """
    lowerable = _lowerable(state, given.lower_all)
    state.late = dict.fromkeys(lowerable, given.margin)
    fastest_starts(state, lowerable, given.time_limit_s)
    return lowerable


def _at_base(plan: Plan, hidden: str, graph: OpGraph, *records: Any) -> Plan:
    """Return the plan with all operators in the base; `hidden` states the doubt about the gain."""
    profiles, cluster, given, sensitivity = records
    base = {c.name: at_base(graph, plan[c.name], profiles[c.name]) for c in cluster.classes}
    plan = as_plan(graph, base, profiles, cluster, given, sensitivity=sensitivity)
    return replace(plan, target_s=plan.step_s, kept_base=kept_base(hidden, plan))


def kept_base(hidden: str, plan: Plan) -> str:
    """Return the reason why a plan lowers nothing; `hidden` states the too small gain of lowering."""
    return (
        f"{hidden}: it is not used, and every operator runs in {plan.base}; {AGAIN} on a quieter machine "
        "or for longer (QSYNC_PROFILE_S=120), or give slack=0 for the fastest plan"
    )


def _target_s(state: State, lowerable: list[str], slack: float | None) -> float:
    """Return the default target: the step of the fastest start plus slack (see `Options.slack`)."""
    least_s = state.step_s()
    if slack is not None or not lowerable:
        return least_s * (1 + (slack or 0.0))
    strongest_s = max(
        (one.work.total_s for name, one in state.classes.items() if name not in lowerable), default=0.0
    )
    waited_s = max(state.classes[name].work.total_s for name in lowerable) - strongest_s
    error = max(state.classes[name].part.profile.error for name in lowerable)
    return least_s + max(0.0, min(error * least_s, waited_s))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collection within the context: planning makes no reference cycles.

    Collection took an eighth of the time (Llama-3-70B's graph on an AMD EPYC, greedy).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _affordable_margin(state: State, lowerable: list[str], target_s: float, margin: float) -> float:
    """Return the margin, or the largest one that the fastest start keeps, to 1/1024 of the margin."""

    def holds(part: float) -> bool:
        state.late = dict.fromkeys(lowerable, part)
        return state.late_step_s() <= target_s * (1 + TOLERANCE)

    if holds(margin):
        return margin
    low, high = 0.0, margin
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def as_plan(
    graph: OpGraph,
    assignments: Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    given: Constraints | None = None,
    *,
    target_s: float | None = None,
    sensitivity: Sensitivity | None = None,
) -> Plan:
    """Return a plan of these assignments with replay's predictions.

    `given` supplies the bucket cap, the operators that save less and the base; its other fields are not read.
    Without a sensitivity the plan's variance is stated as 0.
    """
    given = given or Constraints()
    base = base_of_graph(graph, given.base)
    chosen = {
        c.name: ClassPlan(
            {op.name: assignments[c.name].get(op.name, Precision.FP32) for op in graph.adjustable},
            profile_hash=profiles[c.name].hash,
            saving_less=tuple((given.saving_less or {}).get(c.name, ())),
            origin=profiles[c.name].origin,
            base=base_on(base, bases_of(c.device, c.precisions)),
            carries_16bit=c.carried_16bit is not None,
            bitwise=profiles[c.name].bitwise,
        )
        for c in cluster.classes
    }
    levers = {name: profile.setting.levers for name, profile in profiles.items() if profile.setting}
    plan = Plan(
        graph.model, graph.hash, chosen, target_s=target_s, bucket_cap_bytes=given.bucket_cap_bytes,
        levers=Levers(levers) if levers else None, base=base, batch=graph.batch_shapes,
    )  # fmt: skip
    timeline = replay(graph, plan, profiles, cluster, bucket_cap_bytes=given.bucket_cap_bytes)
    classes, ops = {}, {op.name: op for op in graph.adjustable}
    for device_class in cluster.classes:
        name, variance, base_variance = device_class.name, 0.0, 0.0
        if sensitivity is not None:
            weight = gradient_weight(device_class, profiles, cluster)
            own = chosen[name].base
            variance = sum(
                weight * added_variance(sensitivity, ops[op], p, own)
                for op, p in chosen[name].assignment.items()
            )
            base_variance = weight * sum(sensitivity[op.name, base_of(op, own)] for op in ops.values())
        entry = timeline[name]
        predicted = Predicted(
            entry.compute_s, entry.wait_s, entry.memory_bytes, variance, base_variance,
            sum(profiles[name].state_bytes.values()),
        )  # fmt: skip
        classes[name] = replace(chosen[name], predicted=predicted)
    return replace(plan, classes=classes, step_s=timeline.step_s)


def _lowerable(state: State, lower_all: bool) -> list[str]:
    """Return all classes but the fastest per sample, and that one if its base does not fit."""

    def seconds_a_sample(name: str) -> float:
        setting = state.classes[name].part.profile.setting
        return state.classes[name].work.total_s / (setting.samples if setting else 1)

    strongest = min(state.classes, key=seconds_a_sample)
    return [name for name, one in state.classes.items() if lower_all or name != strongest or not one.fits()]


def _check_reachable(state: State, lowerable: Sequence[str], target_s: float, lower_all: bool) -> None:
    """Raise InfeasibleError if the fastest start and `shorten_step` miss the target."""
    slowest = max(state.classes, key=lambda name: state.classes[name].work.total_s)
    if state.classes[slowest].work.total_s <= target_s < state.step_s():
        shorten_step(state, lowerable, target_s)
    step_s = state.step_s()
    if step_s <= target_s * (1 + TOLERANCE):
        return
    advice = (
        "give a longer target"
        if lower_all
        else "give a longer target, or let the strongest class be lowered too"
    )
    raise InfeasibleError(
        f"no plan reaches a step of {target_s:.6g} s: the fastest one takes {step_s:.6g} s, "
        f"{step_s - target_s:.3g} s too long, and {slowest} is the slowest class; {advice}"
    )

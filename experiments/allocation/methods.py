"""Every method to choose precisions that compare_methods.py compares, at one target for the step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from qsync import Cluster, Plan, Precision
from qsync.allocator import allocate, check_plan, uniform
from qsync.allocator.planner import Options, as_plan
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.solvers.precision_recovery import recover
from qsync.allocator.uniform import strongest_of
from qsync.experiments.harness.emulated_profiles import without_casts
from qsync.records.plan_folder import Basis
from qsync.records.precision import PRECISION_ORDER

MILP, TWO_STAGES = "qsync", "QSync's two stages"
NO_CASTS = "casts left out"
RELATIVE = 1e-6  # as in check_plan: a step so little over the target is rounding

Row = dict[str, Any]


def targets(basis: Basis, parts: Sequence[float]) -> list[tuple[float, float]]:
    """(part, seconds): from the least step to that in FP32, by part. Empty where lowering saves nothing."""
    least = allocate(basis.graph, basis.profiles, basis.sensitivity, basis.cluster, slack=0.0).target_s
    most = uniform(basis.graph, basis.profiles, basis.cluster, {}).step_s
    assert least is not None and most is not None
    if most <= least * (1 + 1e-3):
        return []
    return [(part, least + part * (most - least)) for part in parts]


def compare(basis: Basis, target_s: float) -> list[Row]:
    """Return a row for every method: added variance, step, whether that is within `target_s`, seconds.

    Seconds are the processor's: others on the machine change them little.
    """
    weak = weak_classes(basis)
    begun = time.process_time()
    stages = _row(basis, target_s, TWO_STAGES, two_stages(basis, target_s), begun)
    return [
        solved(basis, target_s), stages, *uniforms(basis, target_s, weak), casts_left_out(basis, target_s)
    ]  # fmt: skip


def weak_classes(basis: Basis) -> list[str]:
    """Return the classes that may be lowered: all but the one whose FP32 step takes least."""
    strongest = strongest_of(uniform(basis.graph, basis.profiles, basis.cluster, {}))
    return [c.name for c in basis.cluster.classes if c.name != strongest]


def two_stages(basis: Basis, target_s: float, **given: Any) -> Plan:
    """Plan by QSync's two stages alone: the fastest start, then recovery. `given` are `Options`."""
    at, options = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster), Options(**given)
    state, weak = State(make_problem(*at, options)), weak_classes(basis)
    for name in weak:
        fastest_start(state, name)
    state.late = dict.fromkeys(weak, options.margin)
    recover(state, weak, target_s)
    found = state.assignments(), basis.profiles, basis.cluster, options
    return as_plan(basis.graph, *found, sensitivity=basis.sensitivity)


def solved(basis: Basis, target_s: float) -> Row:
    """Return the row of qsync's own plan, with its gap, its bound, and what a check finds wrong."""
    at, begun = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster), time.process_time()
    plan = allocate(*at, target_s=target_s)
    row = _row(basis, target_s, MILP, plan, begun)
    found = check_plan(basis.graph, plan, *at[1:])
    return {**row, "gap": plan.gap, "bound": plan.bound, "violations": list(found.violations)}


def uniforms(basis: Basis, target_s: float, weak: Sequence[str]) -> list[Row]:
    """Give every weak class each precision that some of them has; one that lacks it has the next one up."""
    some = {p for name in weak for p in basis.cluster[name].precisions if p is not Precision.FP32}
    rows = []
    for precision in [Precision.FP32, *sorted(some, key=lambda p: -PRECISION_ORDER[p])]:
        chosen = {name: next_up(basis.cluster, name, precision) for name in weak}
        begun = time.process_time()
        plan = uniform(basis.graph, basis.profiles, basis.cluster, chosen, sensitivity=basis.sensitivity)
        rows.append(_row(basis, target_s, f"uniform {precision}", plan, begun))
    return rows


def casts_left_out(basis: Basis, target_s: float) -> Row:
    """Plan by the exact solver as if casts were free, and replay that plan with what they take."""
    begun = time.process_time()
    free = {name: without_casts(profile) for name, profile in basis.profiles.items()}
    found = allocate(basis.graph, free, basis.sensitivity, basis.cluster, target_s=target_s)
    assignments = {name: entry.assignment for name, entry in found.classes.items()}
    plan = as_plan(
        basis.graph, assignments, basis.profiles, basis.cluster, sensitivity=basis.sensitivity
    )  # fmt: skip
    return _row(basis, target_s, NO_CASTS, plan, begun)


def _row(basis: Basis, target_s: float, method: str, plan: Plan, begun: float) -> Row:
    """Return what a plan adds and takes; `begun` is when its method began."""
    seconds, fits = time.process_time() - begun, True
    for name, entry in plan.classes.items():
        predicted = entry.predicted
        fits &= predicted is not None and predicted.memory_bytes <= basis.cluster[name].memory_bytes
    assert plan.step_s is not None
    return {
        "method": method, "added_variance": plan.added_variance, "step_s": plan.step_s,
        "reaches": fits and plan.step_s <= target_s * (1 + RELATIVE), "fits": fits,
        "seconds": seconds, "lowered": {name: len(entry.lowered) for name, entry in plan.classes.items()},
    }  # fmt: skip


def next_up(cluster: Cluster, name: str, precision: Precision) -> Precision:
    """Return this precision, or the next one up that the class has."""
    able: Mapping[Precision, int] = {p: PRECISION_ORDER[p] for p in cluster[name].precisions}
    return min((p for p in able if able[p] >= PRECISION_ORDER[precision]), key=lambda p: able[p])

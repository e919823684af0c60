"""Every method of compare_methods.py to choose precisions for one target step."""

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
from qsync.operators.precision import PRECISION_ORDER
from qsync.records.plan_folder import Basis

MILP, TWO_STAGES = "qsync", "QSync's two stages"
NO_CASTS = "casts left out"
RELATIVE = 1e-6  # as in check_plan: a smaller relative excess over the target is rounding

Row = dict[str, Any]


def targets(basis: Basis, parts: Sequence[float]) -> list[tuple[float, float]]:
    """Return (fraction, seconds) of targets from the least to FP32's step; empty without a gain."""
    least = allocate(basis.graph, basis.profiles, basis.sensitivity, basis.cluster, slack=0.0).target_s
    most = uniform(basis.graph, basis.profiles, basis.cluster, {}).step_s
    assert least is not None and most is not None
    if most <= least * (1 + 1e-3):
        return []
    return [(part, least + part * (most - least)) for part in parts]


def compare(basis: Basis, target_s: float) -> list[Row]:
    """Return a row per method: added variance, step, whether the step meets `target_s`, CPU seconds.

    CPU seconds depend little on other processes.
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
    """Plan by QSync's two stages only: fastest start, then recovery. `given` are `Options`."""
    at, options = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster), Options(**given)
    state, weak = State(make_problem(*at, options)), weak_classes(basis)
    for name in weak:
        fastest_start(state, name)
    state.late = dict.fromkeys(weak, options.margin)
    recover(state, weak, target_s)
    found = state.assignments(), basis.profiles, basis.cluster, options
    return as_plan(basis.graph, *found, sensitivity=basis.sensitivity)


def solved(basis: Basis, target_s: float) -> Row:
    """Return the row of qsync's plan, with gap, bound, and violations found by a check."""
    at, begun = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster), time.process_time()
    plan = allocate(*at, target_s=target_s)
    row = _row(basis, target_s, MILP, plan, begun)
    found = check_plan(basis.graph, plan, *at[1:])
    return {**row, "gap": plan.gap, "bound": plan.bound, "violations": list(found.violations)}


def uniforms(basis: Basis, target_s: float, weak: Sequence[str]) -> list[Row]:
    """Plan each uniform precision for the weak classes; a class without it uses the next higher."""
    some = {p for name in weak for p in basis.cluster[name].precisions if p is not Precision.FP32}
    rows = []
    for precision in [Precision.FP32, *sorted(some, key=lambda p: -PRECISION_ORDER[p])]:
        chosen = {name: next_up(basis.cluster, name, precision) for name in weak}
        begun = time.process_time()
        plan = uniform(basis.graph, basis.profiles, basis.cluster, chosen, sensitivity=basis.sensitivity)
        rows.append(_row(basis, target_s, f"uniform {precision}", plan, begun))
    return rows


def casts_left_out(basis: Basis, target_s: float) -> Row:
    """Plan by the exact solver as if casts were free, and replay the plan with their real times."""
    begun = time.process_time()
    free = {name: without_casts(profile) for name, profile in basis.profiles.items()}
    found = allocate(basis.graph, free, basis.sensitivity, basis.cluster, target_s=target_s)
    assignments = {name: entry.assignment for name, entry in found.classes.items()}
    plan = as_plan(
        basis.graph, assignments, basis.profiles, basis.cluster, sensitivity=basis.sensitivity
    )  # fmt: skip
    return _row(basis, target_s, NO_CASTS, plan, begun)


def _row(basis: Basis, target_s: float, method: str, plan: Plan, begun: float) -> Row:
    """Return a plan's added variance and times; `begun` is the method's start time."""
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
    """Return this precision, or the next higher one that the class supports."""
    able: Mapping[Precision, int] = {p: PRECISION_ORDER[p] for p in cluster[name].precisions}
    return min((p for p in able if able[p] >= PRECISION_ORDER[precision]), key=lambda p: able[p])

"""Every method to choose precisions that compare_methods.py compares, at one target for the step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qsync.allocator import allocate, check_plan, uniform
from qsync.allocator.planner import as_plan
from qsync.allocator.problem import PRECISION_ORDER, make_problem
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.allocator.state import State
from qsync.experiments.allocation.additive import additive
from qsync.experiments.allocation.balanced import balanced
from qsync.experiments.allocation.orders import lower_by_time, raise_at_random, raise_by_variance
from qsync.records.basis import Basis
from qsync.records.cluster import Cluster
from qsync.records.plans import Plan
from qsync.records.precision import Precision

MILP, GREEDY = "qsync, MILP", "qsync, greedy"
RANDOM, RANDOM_MEDIAN = "random, best of {}", "random, median of {}"
BY_VARIANCE, BY_TIME = "by sensitivity alone", "by latency alone"
ADDITIVE, REPAIRED = "additive program, as solved", "additive program, until replay agrees"
BATCHES = "dynamic batching (LB-BSP)"
RELATIVE = 1e-6  # as in check_plan: a step so little over the target is rounding

Row = dict[str, Any]


def targets(basis: Basis, parts: Sequence[float]) -> list[tuple[float, float]]:
    """(part, seconds): from the least step to that in FP32, by part. Empty where lowering saves nothing."""
    at = (basis.graph, basis.profiles, basis.cluster)
    least = allocate(basis.graph, basis.profiles, basis.sensitivity, basis.cluster, solver="greedy").target_s
    most = uniform(*at, {}).step_s
    assert least is not None and most is not None
    if most <= least * (1 + 1e-3):
        return []
    return [(part, least + part * (most - least)) for part in parts]


def compare(basis: Basis, target_s: float, *, seeds: int = 30) -> list[Row]:
    """Return a row for every method: added variance, step, whether that is within `target_s`, seconds.

    Seconds are the processor's: others on the machine change them little.
    """
    one = _One(basis, target_s)
    rows = [one.solved(MILP, "milp"), one.solved(GREEDY, "greedy")]
    rows += one.uniforms()
    rows += one.orders(seeds)
    rows += one.additive()
    rows.append(one.dynamic_batching())
    return rows


def weak_classes(basis: Basis) -> list[str]:
    """Return the classes that may be lowered: all but the one whose FP32 step takes least."""
    full = uniform(basis.graph, basis.profiles, basis.cluster, {})
    compute = {name: entry.predicted.compute_s for name, entry in full.classes.items() if entry.predicted}
    strongest = min(compute, key=lambda name: compute[name])
    return [name for name in compute if name != strongest]


class _One:
    """One problem: what all methods begin with."""

    def __init__(self, basis: Basis, target_s: float) -> None:
        self.basis, self.target_s, self.weak = basis, target_s, weak_classes(basis)
        self.problem = make_problem(basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
        self.state = State(self.problem)
        for name in self.weak:
            fastest_start(self.state, name)
        self.fastest = self.state.assignments()

    def solved(self, method: str, solver: str) -> Row:
        """Qsync's own plan, with its gap and bound."""
        basis, begun = self.basis, time.process_time()
        plan = allocate(
            basis.graph,
            basis.profiles,
            basis.sensitivity,
            basis.cluster,
            target_s=self.target_s,
            solver=solver,
        )
        seconds = time.process_time() - begun
        found = check_plan(basis.graph, plan, basis.profiles, basis.sensitivity, basis.cluster)
        row = self._row(method, plan, seconds)
        return {**row, "gap": plan.gap, "bound": plan.bound, "violations": list(found.violations)}

    def uniforms(self) -> list[Row]:
        """Every precision that some weak class has, on all of them; one that lacks it has the next one up."""
        basis = self.basis
        some = {p for name in self.weak for p in basis.cluster[name].precisions if p is not Precision.FP32}
        rows = []
        for precision in [Precision.FP32, *sorted(some, key=lambda p: -PRECISION_ORDER[p])]:
            chosen = {name: _next_up(basis.cluster, name, precision) for name in self.weak}
            begun = time.process_time()
            plan = uniform(basis.graph, basis.profiles, basis.cluster, chosen, sensitivity=basis.sensitivity)
            rows.append(self._row(f"uniform {precision}", plan, time.process_time() - begun))
        return rows

    def orders(self, seeds: int) -> list[Row]:
        """Random assignments, sensitivity alone, latency alone."""
        rows, drawn = [], []
        for seed in range(seeds):
            drawn.append(self._ordered("", lambda seed=seed: raise_at_random(  # type: ignore[misc]
                self.state, self.weak, self.target_s, seed)))  # fmt: skip
        drawn.sort(key=lambda row: row["added_variance"])
        seconds = sum(row["seconds"] for row in drawn)
        best = {**drawn[0], "method": RANDOM.format(seeds), "seconds": seconds}
        variance = statistics.median_low(row["added_variance"] for row in drawn)
        middle = next(row for row in drawn if row["added_variance"] == variance)
        rows += [best, {**middle, "method": RANDOM_MEDIAN.format(seeds), "seconds": seconds / seeds}]
        rows.append(self._ordered(
            BY_VARIANCE, lambda: raise_by_variance(self.state, self.weak, self.target_s)))  # fmt: skip
        rows.append(self._ordered(BY_TIME, lambda: lower_by_time(self.state, self.weak, self.target_s)))
        return rows

    def _ordered(self, method: str, go: Callable[[], object]) -> Row:
        self.state.restore(self.fastest)
        begun = time.process_time()
        go()
        seconds = time.process_time() - begun
        return self._assigned(method, self.state.assignments(), seconds)

    def additive(self) -> list[Row]:
        """Solve the program without casts: its plan in full replay, and after its target was shortened."""
        self.state.restore(self.fastest)
        begun = time.process_time()
        found = additive(self.state, self.weak, self.target_s)
        seconds = time.process_time() - begun
        none = {"added_variance": None, "step_s": None, "reaches": False, "seconds": seconds}
        return [
            self._assigned(method, {**self.fastest, **chosen}, seconds) if chosen is not None
            else {"method": method, **none}
            for method, chosen in ((ADDITIVE, found.solved), (REPAIRED, found.repaired))
        ]  # fmt: skip

    def dynamic_batching(self) -> Row:
        """All FP32, samples shared so that all finish together: nothing rounded, so nothing added."""
        basis, begun = self.basis, time.process_time()
        full = uniform(basis.graph, basis.profiles, basis.cluster, {}, sensitivity=basis.sensitivity)
        found = balanced(basis.graph, full, basis.profiles, basis.cluster)
        fits = all(found.memory_bytes[c.name] <= c.memory_bytes for c in basis.cluster.classes)
        return {
            "method": BATCHES, "added_variance": 0.0, "step_s": found.step_s,
            "reaches": fits and found.step_s <= self.target_s * (1 + RELATIVE), "fits": fits,
            "seconds": time.process_time() - begun, "shares": dict(found.shares),
            "weight_error": found.weight_error, "batch_norms": found.batch_norms,
        }  # fmt: skip

    def _assigned(
        self, method: str, assignments: Mapping[str, Mapping[str, Precision]], seconds: float
    ) -> Row:
        basis = self.basis
        plan = as_plan(basis.graph, assignments, basis.profiles, basis.cluster, sensitivity=basis.sensitivity)
        return self._row(method, plan, seconds)

    def _row(self, method: str, plan: Plan, seconds: float) -> Row:
        fits = all(
            entry.predicted is not None
            and entry.predicted.memory_bytes <= self.basis.cluster[name].memory_bytes
            for name, entry in plan.classes.items()
        )
        assert plan.step_s is not None
        return {
            "method": method, "added_variance": plan.added_variance, "step_s": plan.step_s,
            "reaches": fits and plan.step_s <= self.target_s * (1 + RELATIVE), "fits": fits,
            "seconds": seconds, "lowered": {name: len(entry.lowered) for name, entry in plan.classes.items()},
        }  # fmt: skip


def _next_up(cluster: Cluster, name: str, precision: Precision) -> Precision:
    return min(
        (p for p in cluster[name].precisions if PRECISION_ORDER[p] >= PRECISION_ORDER[precision]),
        key=lambda p: PRECISION_ORDER[p],
    )

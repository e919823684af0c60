"""Stage 2: raise operators while the step and the memory hold (QSync, arXiv:2407.02327, second stage)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from qsync.allocator.fastest import sibling_groups
from qsync.allocator.problem import RANK
from qsync.allocator.state import State
from qsync.precision import Precision

# Operators of one class that are raised together, with their precisions.
Raise = Mapping[str, Precision]
# The order in which raises are tried: larger is earlier.
Priority = Callable[[State, str, Raise], float]

# Replay sums floats, so two orders of the same sum may differ in the last bits.
TOLERANCE = 1e-9


def variance_regained(state: State, device_class: str, raised: Raise) -> float:
    """(n_c / N^2) (omega[now] - omega[higher]): QSync's order."""
    one = state.classes[device_class]
    return sum(
        one.part.variance[op][one.precision(op)] - one.part.variance[op][p] for op, p in raised.items()
    )


def regained_per_second(state: State, device_class: str, raised: Raise) -> float:
    """Variance regained per second of compute that the class loses by it (ours): a knapsack's density."""
    one = state.classes[device_class]
    regained, now = variance_regained(state, device_class, raised), one.costs.total_s
    move = state.move(device_class, raised)
    lost = one.costs.total_s - now
    state.back(move)
    return regained / max(lost, 1e-12)


PRIORITIES: tuple[Priority, ...] = (variance_regained, regained_per_second)


def recover(state: State, classes: Sequence[str], target_s: float, priority: Priority) -> None:
    """Raise operators of these classes, best first, while the step is within `target_s` and memory holds.

    Every raise of an operator is tried, so one whose jump to FP32 costs too much may still stop half way; a
    raise that does not hold is undone exactly. Operators that read one value are also raised together: alone
    the first of them would pay for a cast that the others still need (ours). Raising a neighbour can remove a
    cast and make a refused raise affordable, so passes are repeated until one changes nothing.
    """
    for name in classes:
        _try(state, name, state.classes[name].part.highest, target_s)
    while _pass(state, classes, target_s, priority):
        pass


def holds(state: State, target_s: float) -> bool:
    """Whether the step is within the target, late classes included, and every class within its memory."""
    most = target_s * (1 + TOLERANCE)
    if any(one.alone_s * (1 + state.late.get(name, 0.0)) > most for name, one in state.classes.items()):
        return False
    return state.late_step_s() <= most and all(one.fits() for one in state.classes.values())


def is_raise(state: State, device_class: str, op: str, precision: Precision) -> bool:
    """Whether this precision adds less variance than the operator's own, or as much and is called higher."""
    one = state.classes[device_class]
    variance, now = one.part.variance[op], one.precision(op)
    return (variance[precision], -RANK[precision]) < (variance[now], -RANK[now])


def _pass(state: State, classes: Sequence[str], target_s: float, priority: Priority) -> bool:
    heap = [
        (-priority(state, name, raised), number, name, raised)
        for number, (name, raised) in enumerate(_raises(state, classes))
    ]
    # The number makes ties deterministic: class order, then model order, then the highest first.
    heapq.heapify(heap)
    changed = False
    while heap:
        _, _, name, raised = heapq.heappop(heap)
        still = {op: precision for op, precision in raised.items() if is_raise(state, name, op, precision)}
        changed |= bool(still) and _try(state, name, still, target_s)
    return changed


def _raises(state: State, classes: Sequence[str]) -> Iterator[tuple[str, Raise]]:
    for name in classes:
        choices = state.classes[name].part.choices
        for op, options in choices.items():
            for precision in reversed(options):
                if is_raise(state, name, op, precision):
                    yield name, {op: precision}
        for group in sibling_groups(state.problem.graph, choices):
            for precision in reversed(choices[group[0]]):
                able = [
                    op for op in group if precision in choices[op] and is_raise(state, name, op, precision)
                ]
                if len(able) > 1:
                    yield name, dict.fromkeys(able, precision)


def _try(state: State, name: str, assignment: Raise, target_s: float) -> bool:
    """Make a change if the step and the memory hold with it."""
    move = state.move(name, assignment)
    if not move.changes:
        return False
    if holds(state, target_s):
        return True
    state.back(move)
    return False

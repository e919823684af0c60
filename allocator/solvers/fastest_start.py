"""Stage 1: the fastest feasible start of one class (QSync, arXiv:2407.02327, allocator, first stage)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.search_state import State
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.milp_expressions import Sum, total
from qsync.errors import InfeasibleError
from qsync.predictor.memory.peak import Memory
from qsync.records.precision import Precision
from qsync.replayer import step_time

# A change must save this part of the class's time: less is rounding.
_MEANINGFUL = 1e-9
# No mixture needs less than this part of the memory of the smallest uniform assignment.
_SMALLER = 0.5
_MAX_SWEEPS = 20
# No mixture takes less than this part of the time of the best uniform assignment.
_FASTER = 0.5
# The time of the best uniform start is scaled to this number: HiGHS stops at differences of a millionth.
_SCALED, _TIME_LIMIT_S = 1e4, 5.0
# Enumerating this many assignments of a class takes less time than a search.
_MAX_ENUMERATED = 1000


def fastest_starts(state: State, names: Sequence[str]) -> None:
    """Bring classes, the slowest first, to their fastest starts as far as that shortens the step.

    A class that fits its memory and lengthens no step in its best uniform assignment stays there.

    >>> fastest_starts(state, ["infer"])
    """
    for name in names:
        state.move(name, _fastest_uniform(state, name))
    left = sorted(names, key=lambda name: -state.classes[name].work.total_s)
    while left:
        works = state.late_works()
        faster = works | {name: works[name].slower(_FASTER) for name in left}
        least_s = step_time(list(faster.values()), state.problem.exchange)
        name = left.pop(0)
        if least_s < state.late_step_s() * (1 - _MEANINGFUL) or not state.classes[name].fits():
            fastest_start(state, name)


def fastest_start(state: State, device_class: str) -> None:
    """Bring one class to the assignment whose operators and casts take least time, within its memory budget.

    Times of operators and casts add up, so the least is the solution of a program. Where the device waits for
    launches, coordinate descent from the best uniform start follows. Raises InfeasibleError, naming the
    class, the missing bytes and the operator that holds most, if nothing fits.
    """
    state.move(device_class, _fastest_uniform(state, device_class))
    if not _solve(state, device_class):
        _descend(state, device_class)
    if not state.classes[device_class].fits() and not _fastest_that_fits(state, device_class):
        _fit(state, device_class)


def _fastest_uniform(state: State, device_class: str) -> dict[str, Precision]:
    """Return the uniform start of least time; the first of equals, as sums may differ in the last digit."""
    starts = list(uniform_starts(state, device_class))
    totals = [state.classes[device_class].seconds_at(start) for start in starts]
    least = min(totals) * (1 + _MEANINGFUL)
    return next(start for start, total in zip(starts, totals, strict=True) if total <= least)


def uniform_starts(state: State, device_class: str) -> Iterator[dict[str, Precision]]:
    """Yield the highest assignment, then each precision wherever it may be chosen, the highest first."""
    part = state.classes[device_class].part
    yield part.highest
    for precision in Precision:  # declared from the highest to the lowest
        start = {
            op: precision if precision in options else options[-1] for op, options in part.choices.items()
        }
        if start != part.highest:
            yield start


def _solve(state: State, device_class: str) -> bool:
    """Move a class to the assignment of least time, by HiGHS; return whether it was found."""
    one = state.classes[device_class]
    if one.costs.launches is not None:  # waits for launches do not add up
        return False
    model, seconds = ClassModel(one.part.graph, one.part, 0.0, math.inf), Sum()
    seconds.add(total([*model.forward_s, *model.backward_s]), _SCALED / one.own_s)
    if model.program.num_columns:
        found = model.program.solve(seconds, gap=_MEANINGFUL, time_limit_s=_TIME_LIMIT_S)
        if found.x is None:
            return False
        uniform_s = one.own_s
        move = state.move(device_class, model.assignment(found.x))
        if one.own_s > uniform_s:
            state.back(move)
    return True


def _descend(state: State, device_class: str) -> None:
    """Give each operator the precision that is cheapest given its neighbours, until none changes.

    Operators that read one value also move together, since they share its cast.
    """
    one = state.classes[device_class]
    groups: list[tuple[str, ...]] = [(op,) for op, options in one.part.choices.items() if len(options) > 1]
    groups += sibling_groups(state.problem.graph, one.part.choices)
    for _ in range(_MAX_SWEEPS):
        if not any([_cheapest(state, device_class, group) for group in groups]):
            return


def _cheapest(state: State, device_class: str, group: Sequence[str]) -> bool:
    """Give a group the precision that costs the class least; return whether it changed."""
    one = state.classes[device_class]
    now = best = one.own_s
    chosen: Precision | None = None
    for precision in one.part.choices[group[0]]:
        if any(precision not in one.part.choices[op] for op in group):
            continue
        move = state.move(device_class, dict.fromkeys(group, precision))
        if one.own_s < best - _MEANINGFUL * now:
            best, chosen = one.own_s, precision
        state.back(move)
    if chosen is not None:
        state.move(device_class, dict.fromkeys(group, chosen))
    return chosen is not None


def shorten_step(state: State, names: Sequence[str], target_s: float) -> None:
    """Change single operators of these classes until the step takes no longer than the target, if it can.

    Where the exchange takes most of a step, a class that computes longer may hand over its gradients earlier.
    """
    for _ in range(_MAX_SWEEPS):
        before_s = least_s = state.step_s()
        for name in names:
            one = state.classes[name]
            for op, options in one.part.choices.items():
                for precision in options:
                    move = state.move(name, {op: precision})
                    step_s = state.step_s()
                    if step_s < least_s * (1 - _MEANINGFUL) and one.fits():
                        least_s = step_s
                    else:
                        state.back(move)
        if not target_s < least_s < before_s:
            return


def every_assignment(state: State, device_class: str) -> list[dict[str, Precision]]:
    """Return all assignments of a class, or none if there are more than `_MAX_ENUMERATED`."""
    choices = state.classes[device_class].part.choices
    if math.prod(len(options) for options in choices.values()) > _MAX_ENUMERATED:
        return []
    return [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]


def _fastest_that_fits(state: State, device_class: str) -> bool:
    """Move a class to the fastest of all its assignments that fit; return whether one was found."""
    one, found = state.classes[device_class], []
    for number, assignment in enumerate(every := every_assignment(state, device_class)):
        state.move(device_class, assignment)
        if one.fits():
            found.append((one.own_s, number))
    if found:
        state.move(device_class, every[min(found)[1]])
    return bool(found)


def _fit(state: State, device_class: str) -> None:
    """Trade as little time as possible for memory: from the present assignment, else from each start.

    Where the smallest of the starts is far too large, none is changed.
    """
    one = state.classes[device_class]
    starts = [one.lowering.assignment(), *uniform_starts(state, device_class)]
    peaks = []
    for start in starts:
        state.move(device_class, start)
        peaks.append(one.peak_bytes)
    is_hopeless = min(peaks) * _SMALLER > one.part.budget_bytes
    least: Memory | None = None
    for start in starts:
        state.move(device_class, start)
        if not is_hopeless:
            _save_memory(state, device_class)
        if one.fits():
            return
        memory = one.memory()
        if least is None or memory.peak_bytes < least.peak_bytes:
            least = memory
    assert least is not None
    raise InfeasibleError(
        f"{device_class}: no assignment fits in its memory of {one.part.budget_bytes} bytes; the smallest "
        f"step found needs {least.peak_bytes - one.part.budget_bytes} bytes more, and {least.largest} holds "
        f"most ({least.saved_by.get(least.largest, 0)} bytes for backward); give the class more memory or a "
        "smaller batch"
    )


def _save_memory(state: State, device_class: str) -> None:
    """Lower the peak until it fits or nothing lowers it; most bytes saved per second lost first."""
    one = state.classes[device_class]
    while not one.fits():
        before = reached = one.peak_bytes
        for _, op, precision in sorted(_savings(state, device_class), key=lambda entry: entry[0]):
            move = state.move(device_class, {op: precision})
            if one.peak_bytes >= reached:
                state.back(move)
                continue
            reached = one.peak_bytes
            if one.fits():
                return
        if reached == before:
            return


def _savings(state: State, device_class: str) -> Iterator[tuple[tuple[float, int], str, Precision]]:
    """Yield single changes that save memory, keyed so that the best sorts first, ties in model order."""
    one = state.classes[device_class]
    now, peak = one.own_s, one.peak_bytes
    for number, (op, options) in enumerate(one.part.choices.items()):
        for precision in options:
            if precision is one.precision(op):
                continue
            move = state.move(device_class, {op: precision})
            saved, lost = peak - one.peak_bytes, one.own_s - now
            state.back(move)
            if saved > 0:
                yield (-saved / max(lost, 1e-12), number), op, precision

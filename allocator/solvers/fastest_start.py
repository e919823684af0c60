"""Stage 1: the fastest feasible start of one class (QSync, arXiv:2407.02327, allocator, first stage)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.search_state import ClassState, State
from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.memory_rows import MemoryRows
from qsync.allocator.solvers.milp_expressions import (
    INFEASIBLE,
    OPTIMAL,
    STATUSES,
    TIME_LIMITED,
    UNSOLVED,
    FloatArray,
    Sum,
    total,
)
from qsync.errors import DoesNotFitError
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import Memory
from qsync.replayer import step_time

# Savings below this fraction of the class's time count as rounding.
_MEANINGFUL = 1e-9
# Assumption: no mixed assignment needs less than this fraction of the smallest uniform one's memory.
_SMALLER = 0.5
_MAX_SWEEPS = 20
# Assumption: no mixed assignment takes less than this fraction of the best uniform one's time.
_FASTER = 0.5
# The best uniform start's time in the program, since HiGHS has an absolute tolerance of 1e-6; seconds.
_SCALED, _TIME_LIMIT_S = 1e4, 5.0
# With levers of blocks: the relative gap to the least time until a solution fits, and then (to which training
# repeats its steps), a time limit, and the most solutions beyond memory.
_FIRST_GAP, _LEVER_GAP, _LEVER_LIMIT_S, _MAX_ROUNDS = 0.3, 1e-2, 20.0, 30
# Enumeration of up to this many assignments is faster than a search.
_MAX_ENUMERATED = 1000


def fastest_starts(state: State, names: Sequence[str], limit_s: float = _LEVER_LIMIT_S) -> None:
    """Move classes to their fastest starts, the slowest class first, if that may shorten the step.

    A class stays in its best uniform assignment if that fits in memory and a faster one shortens no step.
    Levers of blocks that fit are improved for `limit_s` at most.

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
            _from_uniform(state, name, limit_s)


def fastest_start(state: State, device_class: str, limit_s: float = _LEVER_LIMIT_S) -> None:
    """Move one class to the assignment of least compute time within its memory budget.

    Raises DoesNotFitError if nothing fits, naming the class, the missing bytes and the operator that saves
    most.
    """
    state.move(device_class, _fastest_uniform(state, device_class))
    _from_uniform(state, device_class, limit_s)


def _from_uniform(state: State, device_class: str, limit_s: float) -> None:
    """Move one class from its best uniform assignment to its fastest start.

    Times of operators and casts add up, so an integer program finds the least. If the profile has kernel
    launches, whose waits do not add up, coordinate descent replaces it. Raises DoesNotFitError as
    `fastest_start`.
    """
    if not _solve(state, device_class):
        _descend(state, device_class)
    if state.classes[device_class].fits():
        return
    fastest = state.classes[device_class].lowering.assignment()
    status = _fastest_with_levers(state, device_class, limit_s)
    if status == TIME_LIMITED and state.classes[device_class].fits():
        _prefer_no_levers(state, device_class, fastest)
    elif status != OPTIMAL and (status == INFEASIBLE or not _fastest_that_fits(state, device_class)):
        _fit(state, device_class, is_hopeless=status == INFEASIBLE)


def _fastest_uniform(state: State, device_class: str) -> dict[str, Precision]:
    """Return the first uniform start whose time is least up to rounding."""
    starts = list(uniform_starts(state, device_class))
    totals = [state.classes[device_class].seconds_at(start) for start in starts]
    least = min(totals) * (1 + _MEANINGFUL)
    return next(start for start, total in zip(starts, totals, strict=True) if total <= least)


def uniform_starts(state: State, device_class: str) -> Iterator[dict[str, Precision]]:
    """Yield the highest assignment, then for each precision the one that uses it wherever possible."""
    part = state.classes[device_class].part
    yield part.highest
    for precision in Precision:  # declared from the highest to the lowest
        start = {
            op: precision if precision in options else options[-1] for op, options in part.choices.items()
        }
        if start != part.highest:
            yield start


def _solve(state: State, device_class: str) -> bool:
    """Move a class to the assignment of least time by HiGHS; return whether HiGHS found one."""
    one = state.classes[device_class]
    if one.costs.launches is not None:  # waits for launches do not add up
        return False
    part = replace(state.plain(device_class).part, blocks=())
    model, seconds = ClassModel(state.problem.graph, part, 0.0, math.inf), Sum()
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


def _fastest_with_levers(state: State, device_class: str, limit_s: float) -> str:
    """Move a class to precisions and levers of least time that fit; return HiGHS's status.

    Solutions are rough until one fits, and then improved for `limit_s` at most. If none fit, leave the class
    with as many recomputed blocks as it has, or saving less. INFEASIBLE means that nothing fits (proved), and
    OPTIMAL that the solution is within the gap.
    """
    plain, end = state.plain(device_class), time.perf_counter() + _LEVER_LIMIT_S
    if not plain.part.blocks:
        return UNSOLVED
    model, seconds = ClassModel(state.problem.graph, plain.part, 0.0, math.inf), Sum()
    memory = MemoryRows(model, plain.part, state.problem.cluster.num_ranks)
    seconds.add(total([*model.forward_s, *model.backward_s]), _SCALED / plain.own_s)
    whole = model.program.binary()  # 1, so that the gap is relative to all seconds
    model.program.row(whole, 1.0, 1.0)
    seconds.add(whole, seconds.constant)
    best: FloatArray | None = None
    gap, least_s, status, is_proved = _FIRST_GAP, math.inf, UNSOLVED, False
    for _ in range(_MAX_ROUNDS):
        left_s = end - time.perf_counter()
        found = model.program.solve(seconds, also=memory.rows(), gap=gap, time_limit_s=left_s)
        if found.x is None:
            status = STATUSES[found.status] if memory.is_exact else UNSOLVED
            break
        one = _move_to(state, device_class, model, found.x)
        if not one.fits():
            memory.tighten(found.x, one)
            continue
        if one.own_s < least_s:
            best, least_s = found.x, one.own_s
        if is_proved := found.mip_gap <= _LEVER_GAP:
            break
        if gap != _LEVER_GAP:
            gap, end = _LEVER_GAP, min(end, time.perf_counter() + limit_s)
    if best is None:
        state.treat(device_class, tuple(block.options[-1] for block in plain.part.blocks))
        return status
    _move_to(state, device_class, model, best)
    return OPTIMAL if is_proved else TIME_LIMITED


def _prefer_no_levers(state: State, device_class: str, start: Mapping[str, Precision]) -> None:
    """Move a class to precisions alone, from a `start`, if these fit and are faster than its levers.

    They are looked for during `_TIME_LIMIT_S` at most: in a large graph one change of each operator takes
    longer.
    """
    one = state.classes[device_class]
    levers, assignment = one.treatment, one.lowering.assignment()
    state.treat(device_class, state.plain(device_class).treatment)
    state.move(device_class, start)
    with suppress(DoesNotFitError):
        _fit(state, device_class, False, time.perf_counter() + _TIME_LIMIT_S)
    plain = state.classes[device_class]
    if not plain.fits() or plain.own_s >= one.own_s:
        state.restore({device_class: assignment}, {device_class: levers})


def _move_to(state: State, device_class: str, model: ClassModel, point: FloatArray) -> ClassState:
    """Give a class a solution's levers and precisions; return it."""
    state.treat(device_class, model.treatment(point))
    state.move(device_class, model.assignment(point))
    return state.classes[device_class]


def _descend(state: State, device_class: str) -> None:
    """Reduce a class's time by coordinate descent over operators, until no precision changes.

    Operators that read the same value also change together, since they share its cast.
    """
    one = state.classes[device_class]
    groups: list[tuple[str, ...]] = [(op,) for op, options in one.part.choices.items() if len(options) > 1]
    groups += sibling_groups(state.problem.graph, one.part.choices)
    for _ in range(_MAX_SWEEPS):
        if not any([_cheapest(state, device_class, group) for group in groups]):
            return


def _cheapest(state: State, device_class: str, group: Sequence[str]) -> bool:
    """Assign to a group the precision of least class time; return whether it changed."""
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
    """Change single operators of these classes to shorten the step, until it reaches the target.

    If all-reduces take most of a step, a class with a longer compute time may still finish buckets earlier.
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


def _fit(state: State, device_class: str, is_hopeless: bool, until_s: float = math.inf) -> None:
    """Reduce memory at least cost in time, from the current, then from each uniform assignment.

    If that is hopeless, as even the smallest start is far above the budget, raise DoesNotFitError without a
    search.
    """
    one = state.classes[device_class]
    starts = [one.lowering.assignment(), *uniform_starts(state, device_class)]
    peaks = []
    for start in starts:
        state.move(device_class, start)
        peaks.append(one.peak_bytes)
    is_hopeless |= min(peaks) * _SMALLER > one.part.budget_bytes
    least: Memory | None = None
    for start in starts:
        state.move(device_class, start)
        if not is_hopeless:
            _save_memory(state, device_class, until_s)
        if one.fits():
            return
        memory = one.memory()
        if least is None or memory.peak_bytes < least.peak_bytes:
            least = memory
    assert least is not None
    raise DoesNotFitError(
        f"{device_class}: no assignment fits in its memory of {one.part.budget_bytes} bytes; the smallest "
        f"step found needs {least.peak_bytes - one.part.budget_bytes} bytes more, and {least.largest} holds "
        f"most ({least.saved_by.get(least.largest, 0)} bytes for backward); give the class more memory or a "
        "smaller batch"
    )


def _save_memory(state: State, device_class: str, until_s: float) -> None:
    """Reduce the memory peak until it fits, no change helps, or time is up; best bytes per second first."""
    one = state.classes[device_class]
    while not one.fits():
        before = reached = one.peak_bytes
        for _, op, precision in sorted(_savings(state, device_class, until_s), key=lambda entry: entry[0]):
            move = state.move(device_class, {op: precision})
            if one.peak_bytes >= reached:
                state.back(move)
                continue
            reached = one.peak_bytes
            if one.fits():
                return
        if reached == before:
            return


def _savings(
    state: State, device_class: str, until_s: float
) -> Iterator[tuple[tuple[float, int], str, Precision]]:
    """Yield (sort key, operator, precision) of changes that save memory; the best key is least."""
    one = state.classes[device_class]
    now, peak = one.own_s, one.peak_bytes
    for number, (op, options) in enumerate(one.part.choices.items()):
        if time.perf_counter() > until_s:
            return
        for precision in options:
            if precision is one.precision(op):
                continue
            move = state.move(device_class, {op: precision})
            saved, lost = peak - one.peak_bytes, one.own_s - now
            state.back(move)
            if saved > 0:
                yield (-saved / max(lost, 1e-12), number), op, precision

"""Stage 1: the fastest feasible start of one class (QSync, arXiv:2407.02327, allocator, first stage)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.search_state import State
from qsync.errors import InfeasibleError
from qsync.predictor.memory.peak import Memory
from qsync.records.precision import Precision

# A change must save this part of the class's time: less is rounding.
_MEANINGFUL = 1e-9
_MAX_SWEEPS = 20
# Enumerating this many assignments of a class takes less time than a search.
_MAX_ENUMERATED = 1000


def fastest_start(state: State, device_class: str) -> None:
    """Bring one class to the assignment whose operators and casts take least time, within its memory budget.

    Coordinate descent from the best uniform start: each operator takes the precision that is cheapest given
    its neighbours. Operators that read one value also move together, since they share its cast. Operators of
    one structural class are decided at once. Raises InfeasibleError, naming the class, the missing bytes and
    the operator that holds most, if nothing fits.
    """
    starts = list(uniform_starts(state, device_class))
    totals = [state.classes[device_class].seconds_at(start) for start in starts]
    # The first of equals: sums of the same numbers may differ in the last digit.
    best = next(
        s for s, total in zip(starts, totals, strict=True) if total <= min(totals) * (1 + _MEANINGFUL)
    )
    state.move(device_class, best)
    _descend(state, device_class)
    if not state.classes[device_class].fits() and not _fastest_that_fits(state, device_class):
        _fit(state, device_class, starts)


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


def _descend(state: State, device_class: str) -> None:
    one = state.classes[device_class]
    groups: list[tuple[str, ...]] = [(op,) for op, options in one.part.choices.items() if len(options) > 1]
    groups += sibling_groups(state.problem.graph, one.part.choices)
    for _ in range(_MAX_SWEEPS):
        structure, alike = one.structural_classes(), dict[tuple[int, ...], list[tuple[str, ...]]]()
        for group in groups:
            alike.setdefault(tuple(structure[op] for op in group), []).append(group)
        if not any([_cheapest(state, device_class, equal) for equal in alike.values()]):
            return


def _cheapest(state: State, device_class: str, equal: Sequence[tuple[str, ...]]) -> bool:
    """Give groups of equal structure the precision that costs the class least; return whether any changed."""
    one, group = state.classes[device_class], equal[0]
    now = best = one.own_s
    chosen: Precision | None = None

    shared = [p for p in one.part.choices[group[0]] if all(p in one.part.choices[op] for op in group)]
    for precision in shared:
        if all(one.precision(op) is precision for op in group):
            continue
        move = state.move(device_class, dict.fromkeys(group, precision))
        if one.own_s < best - _MEANINGFUL * now:
            best, chosen = one.own_s, precision
        state.back(move)
    if chosen is None:
        return False
    move = state.move(device_class, dict.fromkeys((op for group in equal for op in group), chosen))
    # Adjacent groups may gain less together than alone: then decide each group by itself.
    if one.own_s > best + _MEANINGFUL * now:
        state.back(move)
        state.move(device_class, dict.fromkeys(group, chosen))
        for other in equal[1:]:
            _cheapest(state, device_class, [other])
    return True


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


def _fit(state: State, device_class: str, starts: list[dict[str, Precision]]) -> None:
    """Trade as little time as possible for memory: from the present assignment, else from each start."""
    one = state.classes[device_class]
    least: Memory | None = None
    for start in [one.lowering.assignment(), *starts]:
        state.move(device_class, start)
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

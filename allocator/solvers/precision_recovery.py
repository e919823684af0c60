"""Stage 2: raise operators within target and memory (QSync, arXiv:2407.02327, second stage)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qsync.allocator.op_groups import sibling_groups
from qsync.allocator.search_state import State
from qsync.operators.precision import PRECISION_ORDER, Precision

# Operators of one class that are raised together -> their new precisions.
Raise = Mapping[str, Precision]

# Relative tolerance of step times: the order of floating-point sums changes the last bits.
TOLERANCE = 1e-9
# The least relative gain of a repair; the most raises tried per repair; the most lowerings tried per raise.
_MIN_GAIN, _MAX_REPAIRED, _MAX_LOWERED = 1e-3, 24, 64


def recover(state: State, classes: Sequence[str], target_s: float) -> None:
    """Raise operators of these classes while step and memory stay within target and budgets.

    The raise that regains most variance per second comes first. All precisions are tried, so an operator that
    cannot afford FP32 may still reach a middle precision. A raise that exceeds a limit is undone exactly.
    Operators that read the same value are also raised together: if the first was raised alone, it would pay
    for a cast that the others still need. A raised neighbour can remove a cast and make a rejected raise
    affordable, so passes over all raises repeat until one pass changes nothing.

    >>> recover(state, ["infer"], target_s=0.1)
    """
    raise_classes(state, classes, target_s)
    while _pass(state, classes, target_s):
        pass


def raise_classes(state: State, classes: Sequence[str], target_s: float) -> None:
    """Raise each of these classes to its highest assignment, if the limits allow it.

    >>> raise_classes(state, ["infer"], target_s=0.1)
    """
    for name in classes:
        one = state.classes[name]
        alone_s = one.alone_s - one.own_s + one.seconds_at(one.part.highest)
        if alone_s * state.late_factor(name) <= target_s * (1 + TOLERANCE):
            _raised(state, name, one.part.highest, target_s)


def holds(state: State, target_s: float) -> bool:
    """Return whether the step (with margins) reaches the target and every class fits in memory."""
    most = target_s * (1 + TOLERANCE)
    if any(one.alone_s * state.late_factor(name) > most for name, one in state.classes.items()):
        return False
    return state.late_step_s() <= most and all(one.fits() for one in state.classes.values())


def is_raise(state: State, device_class: str, op: str, precision: Precision) -> bool:
    """Return whether a precision adds less variance than the current one, or as much and is higher."""
    one = state.classes[device_class]
    variance, now = one.part.variance[op], one.precision(op)
    return (variance[precision], -PRECISION_ORDER[precision]) < (variance[now], -PRECISION_ORDER[now])


def _pass(state: State, classes: Sequence[str], target_s: float) -> bool:
    """Try every raise once; return whether any was kept."""
    raises = list(_raises(state, classes))
    raises.sort(key=lambda each: _worth(state, *each))  # stable: ties keep their order
    return any([_raised(state, name, raised, target_s) for name, raised in raises])


def _worth(state: State, name: str, raised: Raise) -> float:
    """Return the variance change of a raise per second lost; the most negative is best."""
    one = state.classes[name]
    added, before_s = one.added_by(raised), one.own_s
    move = state.move(name, raised)
    lost_s = one.own_s - before_s
    state.back(move)
    return added / max(lost_s, 1e-9 * before_s)


def _raised(state: State, name: str, raised: Raise, target_s: float) -> bool:
    """Raise those of the operators that are lower, within the limits; return whether any changed."""
    still = {op: precision for op, precision in raised.items() if is_raise(state, name, op, precision)}
    move = state.move(name, still)
    if move.change and not holds(state, target_s):
        state.back(move)
        return False
    return move.change is not None


def _raises(state: State, classes: Sequence[str]) -> Iterator[tuple[str, Raise]]:
    """Yield all raises, highest first: of single operators, and of all readers of a value."""
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


def repair(state: State, classes: Sequence[str], target_s: float) -> bool:
    """Exchange raises beyond the limits for lowerings elsewhere; return whether any was kept.

    An exchange is kept only if the variance falls. `state` is within all limits before and afterwards.

    >>> repair(state, ["infer"], target_s=0.1)
    """
    raises = sorted(_raises(state, classes), key=lambda each: state.classes[each[0]].added_by(each[1]))
    return any([_exchanged(state, classes, *each, target_s) for each in raises[:_MAX_REPAIRED]])


def _exchanged(state: State, classes: Sequence[str], name: str, raised: Raise, target_s: float) -> bool:
    """Make one raise and compensating lowerings; return whether these were kept (less variance)."""
    before, moves = state.variance * (1 - _MIN_GAIN), [state.move(name, raised)]
    excess = _excess(state, target_s)
    priced: list[tuple[float, int, str, Raise]] = []
    for other, op, precision in _lowerings(state, classes, raised)[:_MAX_LOWERED]:
        added = state.classes[other].added_by({op: precision})
        move = state.move(other, {op: precision})
        saved = excess - _excess(state, target_s)
        state.back(move)
        if saved > 0.0:
            priced.append((added / saved, len(priced), other, {op: precision}))
    for *_, other, lowered in sorted(priced):
        if excess <= 0.0 or state.variance >= before:
            break
        move = state.move(other, lowered)
        if (now := _excess(state, target_s)) < excess:
            excess = now
            moves.append(move)
        else:
            state.back(move)
    if state.variance < before and holds(state, target_s):
        return True
    for move in reversed(moves):
        state.back(move)
    return False


def _excess(state: State, target_s: float) -> float:
    """Return the summed relative excess of the step and of every class's memory over their limits."""
    memory = (one.peak_bytes / one.part.budget_bytes - 1.0 for one in state.classes.values())
    late = state.late_step_s() / (target_s * (1 + TOLERANCE)) - 1.0
    return max(late, 0.0) + sum(max(part, 0.0) for part in memory)


def _lowerings(state: State, classes: Sequence[str], raised: Raise) -> list[tuple[str, str, Precision]]:
    """Return every lowering of operators outside `raised`, least added variance first."""
    found: list[tuple[float, int, str, str, Precision]] = []
    for name in classes:
        one = state.classes[name]
        for op, options in one.part.choices.items():
            for precision in options if op not in raised else ():
                if (added := one.added_by({op: precision})) > 0.0:
                    found.append((added, len(found), name, op, precision))
    return [(name, op, precision) for _, _, name, op, precision in sorted(found)]

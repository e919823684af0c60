"""After recovery: raise an operator that adds much, and pay with others that add little (ours).

Recovery raises by what a second buys and never looks back: a large operator that would have been worth more
than all that came before it may be left without the time it needs. Here it is raised all the same, and others
of its class are lowered, by least variance added per second saved, until the step and the memory hold again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from qsync.allocator.solvers.recovery import holds, is_raise
from qsync.allocator.state import Move, State
from qsync.records.precision import Precision

# Variance per second, or per byte; the operator's number and name; what it would run in; what that saves.
_Payer = tuple[float, int, str, Precision, float]
# What payers save together may be so many times what they save alone.
_TOGETHER = 2.0
# How many operators of a class are tried, the dearest first.
_MOST_RAISED = 16
# How many operators may be lowered to pay for one.
_MOST_LOWERED = 32
# An exchange that lessens a class's variance by a smaller part is not worth looking for.
_LEAST = 1e-3


def exchange(state: State, classes: Sequence[str], target_s: float) -> bool:
    """Make the exchanges that lessen the variance, dearest operator first; whether there was any."""
    changed = False
    for name in classes:
        one = state.classes[name]
        dear = {op: one.part.variance[op][one.precision(op)] for op in one.part.choices}
        least = _LEAST * one.variance
        dear = {op: v for op, v in dear.items() if v > least}
        payers = _Payers(state, name) if dear else None
        for op in sorted(dear, key=lambda op: -dear[op])[:_MOST_RAISED]:
            for precision in reversed(one.part.choices[op]):
                raised = is_raise(state, name, op, precision)
                if payers and raised and _paid(state, name, op, precision, payers, target_s):
                    changed = True
                    break
    return changed


class _Payers:
    """What could be lowered, by the variance that a second saved, or a byte, would add, least first."""

    def __init__(self, state: State, name: str) -> None:
        one = state.classes[name]
        places, seconds, memory = one.places(), list[_Payer](), list[_Payer]()
        for number, (op, options) in enumerate(one.part.choices.items()):
            variance = one.part.variance[op]
            for precision in options:
                more = variance[precision] - variance[one.precision(op)]
                if more <= 0.0:
                    continue
                saved_s = -state.seconds_of(name, {op: precision}, places)
                if saved_s > 0.0:
                    seconds.append((more / saved_s, number, op, precision, saved_s))
                if one.is_tight and (saved := _bytes_saved(state, name, op, precision)) > 0:
                    memory.append((more / saved, number, op, precision, saved))
        self.seconds, self.memory = sorted(seconds), sorted(memory)


def _bytes_saved(state: State, name: str, op: str, precision: Precision) -> int:
    one = state.classes[name]
    peak, move = one.peak_bytes, state.move(name, {op: precision})
    saved = peak - one.peak_bytes
    state.back(move)
    return saved


def _paid(state: State, name: str, op: str, precision: Precision, payers: _Payers, target_s: float) -> bool:
    """Raise one operator and lower others until all holds; undone if that does not lessen the variance."""
    one = state.classes[name]
    variance = one.part.variance
    won = variance[op][one.precision(op)] - variance[op][precision] - _LEAST * one.variance
    moves: list[Move] = [state.move(name, {op: precision})]

    def cost_of(payer: str, lower: Precision) -> float:
        return variance[payer][lower] - variance[payer][one.precision(payer)]

    def can_pay(debt: float, payers: Sequence[_Payer]) -> bool:
        able = (s for _, _, payer, lower, s in payers if payer != op and 0.0 < cost_of(payer, lower) < won)
        return debt <= _TOGETHER * sum(islice(able, _MOST_LOWERED))

    def pay(payers: Sequence[_Payer], enough: Callable[[], bool], owed: Callable[[], float]) -> bool:
        nonlocal won
        if enough():
            return True
        for _, _, payer, lower, _ in payers:
            cost = cost_of(payer, lower)
            if payer == op or not 0.0 < cost < won:
                continue
            before = owed()
            moves.append(state.move(name, {payer: lower}))
            if owed() >= before:
                state.back(moves.pop())
                continue
            won -= cost
            if enough():
                return True
            if len(moves) > _MOST_LOWERED:
                break
        return False

    # Whoever pays in bytes may take time for it, seldom the other way round.
    if (
        can_pay(state.late_step_s() - target_s, payers.seconds)
        and pay(payers.memory, one.fits, lambda: one.peak_bytes)
        and pay(payers.seconds, lambda: holds(state, target_s), lambda: one.costs.total_s)
    ):
        return True
    for move in reversed(moves):
        state.back(move)
    return False

"""After recovery: raise an operator that adds much, and pay with others that add little (ours).

Recovery raises by what a second buys and never looks back: a large operator that would have been worth more
than all that came before it may be left without the time it needs. Here it is raised all the same, and others
of its class are lowered, by least variance added per second saved, until the step and the memory hold again.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync.allocator.recovery import holds, is_raise
from qsync.allocator.state import Move, State
from qsync.precision import Precision

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
        dear = {op: v for op, v in dear.items() if v > _LEAST * one.variance}
        payers = _payers(state, name) if dear else []
        for op in sorted(dear, key=lambda op: -dear[op]):
            for precision in reversed(one.part.choices[op]):
                if is_raise(state, name, op, precision) and _paid(
                    state, name, op, precision, payers, target_s
                ):
                    changed = True
                    break
    return changed


def _payers(state: State, name: str) -> list[tuple[str, Precision]]:
    """What could be lowered, by the variance that a second saved would add, least first."""
    one = state.classes[name]
    now, found = one.costs.total_s, []
    for number, (op, options) in enumerate(one.part.choices.items()):
        variance = one.part.variance[op]
        for precision in options:
            more = variance[precision] - variance[one.precision(op)]
            if more <= 0.0:
                continue
            move = state.move(name, {op: precision})
            saved = now - one.costs.total_s
            state.back(move)
            if saved > 0.0:
                found.append((more / saved, number, op, precision))
    return [(op, precision) for _, _, op, precision in sorted(found)]


def _paid(
    state: State,
    name: str,
    op: str,
    precision: Precision,
    payers: Sequence[tuple[str, Precision]],
    target_s: float,
) -> bool:
    """Raise one operator and lower others until all holds; undone if that does not lessen the variance."""
    one = state.classes[name]
    variance = one.part.variance
    least = _LEAST * one.variance
    won = variance[op][one.precision(op)] - variance[op][precision] - least
    moves: list[Move] = [state.move(name, {op: precision})]
    for payer, lower in payers:
        if holds(state, target_s):
            return True
        cost = variance[payer][lower] - variance[payer][one.precision(payer)]
        if payer == op or not 0.0 < cost < won:
            continue
        if len(moves) > _MOST_LOWERED:
            break
        before = one.costs.total_s
        moves.append(state.move(name, {payer: lower}))
        if one.costs.total_s >= before:
            state.back(moves.pop())
            continue
        won -= cost
    if holds(state, target_s):
        return True
    for move in reversed(moves):
        state.back(move)
    return False

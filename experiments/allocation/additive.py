"""A plan to compare with: an integer program of single operators' times, in which casts are free.

This is how formats are searched layer by layer where nothing runs in between (NVIDIA ModelOpt's
`auto_quantize` scores layers and solves such a program): it cannot know that a cast between two operators
costs time, or that three which read one value share it. So replay is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsync import Precision, Profile
from qsync.allocator.search_state import State
from qsync.allocator.solvers.milp_expressions import Program, Sum
from qsync.allocator.solvers.precision_recovery import TOLERANCE
from qsync.records.profiles import Cost
from qsync.replayer import Work, step_time

Assignments = dict[str, dict[str, Precision]]

# HiGHS stops at differences of a millionth: the variance of the plan that is known is scaled to this, times
# in parts of the target to that.
_KNOWN, _SCALE = 1e4, 1e3
# How many nominal targets are tried.
_MAX_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Additive:
    """The assignments for the target itself, and those for the nominal target that replay asked for.

    None where no assignment is fast enough, by the program's own times or in replay.
    """

    solved: Assignments | None
    repaired: Assignments | None


def additive(state: State, classes: Sequence[str], target_s: float) -> Additive:
    """Make the variance of these classes least, with a step of `target_s` seconds as additive times say.

        minimise    sum over operators of omega[o, p(o)]
        such that   step in FP32 + sum over operators of (t[o, p(o)] - t[o, FP32]) <= target

    class by class, with t the profiled time of the operator by itself and the FP32 step as replayed: only
    the differences are additive. Begins with what `state` has, which must hold, and ends with `state` there.
    """
    begun = state.assignments()
    solved: Assignments | None = state.assignments()
    repaired: Assignments | None = state.assignments()
    for name in classes:
        beside = [one.work for other, one in state.classes.items() if other not in classes]
        late = _Class(state, name, beside)
        first = late.solve(target_s)
        solved = None if first is None or solved is None else {**solved, name: first}
        found = late.repaired(target_s, first)
        repaired = None if found is None or repaired is None else {**repaired, name: found}
    state.restore(begun)
    return Additive(solved, repaired)


class _Class:
    """One class: the seconds and the variance of every choice, and the step with nothing lowered."""

    def __init__(self, state: State, name: str, beside: Sequence[Work]) -> None:
        self._state, self._name, self._beside = state, name, beside
        one = state.classes[name]
        self._part, self._known = one.part, one.variance
        now = state.assignments()[name]
        state.move(name, self._part.highest)
        self._highest_s = self._step_s()
        state.move(name, now)
        self._more_s = {
            op: {
                p: _own_s(one.part.profile, op, p) - _own_s(one.part.profile, op, options[-1])
                for p in options
            }
            for op, options in self._part.choices.items()
        }

    def _step_s(self) -> float:
        works = [self._state.classes[self._name].work, *self._beside]
        return step_time(works, self._state.problem.exchange)

    def solve(self, nominal_s: float) -> dict[str, Precision] | None:
        """Return the assignment of least variance by additive times, None if none is fast enough."""
        best, known = None, self._known
        while True:
            found = self._solved(nominal_s, known)
            if found is None:
                return best
            best, variance = found, self._variance(found)
            # Sensitivities span ten decades: again without what is dearer than all that was found.
            if not 0.0 < variance < 0.5 * known:
                return best
            known = variance

    def _solved(self, nominal_s: float, known: float) -> dict[str, Precision] | None:
        program, bits = Program(), {}
        seconds = Sum(constant=self._highest_s * _SCALE / nominal_s)
        for op, options in self._part.choices.items():
            variance = self._part.variance[op]
            able = [p for p in options if variance[p] <= known] if known > 0.0 else list(options)
            weight = _KNOWN / known if known > 0.0 else 1.0
            bits[op] = dict(zip(able, program.choice([weight * variance[p] for p in able]), strict=True))
            for precision, bit in bits[op].items():
                seconds.add(bit, self._more_s[op][precision] * _SCALE / nominal_s)
        if program.num_columns == 0:
            return {op: next(iter(of)) for op, of in bits.items()}
        result = program.solve(also=[(seconds, -float("inf"), _SCALE * (1 + TOLERANCE))], gap=1e-6)
        if result.x is None:
            return None
        return {op: max(of, key=lambda p: of[p].at(result.x)) for op, of in bits.items()}

    def repaired(self, target_s: float, first: dict[str, Precision] | None) -> dict[str, Precision] | None:
        """Of the assignments for nominal targets, the one of least variance that replay agrees to.

        Bisects between targets that are too long and targets that hold, in both directions: casts and
        followers may also be faster than the program knows.
        """
        fastest = sum(min(more.values()) for more in self._more_s.values())
        low, high = self._highest_s + fastest, max(self._highest_s, target_s)
        best, nominal_s, found = None, target_s, first
        for _ in range(_MAX_ROUNDS):
            holds = found is not None and self._holds(found, target_s)
            if (
                found is not None
                and holds
                and (best is None or self._variance(found) <= self._variance(best))
            ):
                best = found
            # Too short a nominal target has no assignment at all.
            low, high = (nominal_s, high) if holds or found is None else (low, nominal_s)
            nominal_s = (low + high) / 2
            found = self.solve(nominal_s)
        return best

    def _holds(self, assignment: dict[str, Precision], target_s: float) -> bool:
        now = self._state.assignments()[self._name]
        self._state.move(self._name, assignment)
        holds = self._step_s() <= target_s * (1 + TOLERANCE) and self._state.classes[self._name].fits()
        self._state.move(self._name, now)
        return holds

    def _variance(self, assignment: dict[str, Precision]) -> float:
        return sum(self._part.variance[op][p] for op, p in assignment.items())


def _own_s(profile: Profile, op: str, precision: Precision) -> float:
    """Seconds of one operator by itself, forward and backward."""
    modes = profile.ops[op]
    found: Cost | None = modes.get(str(precision))
    if found is None:  # timed only in another order of images, or with an epilogue
        found = next(cost for mode, cost in modes.items() if mode.partition(" ")[0] == precision)
    return found.total_s

"""The assignment of every class during a search: a few operators change at a time, and come back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qsync.allocator.problem import ClassProblem, Problem
from qsync.allocator.structural_classes import Repeats
from qsync.lowering.incremental import Change, Lowering
from qsync.lowering.lowered_graph import EIGHT_BIT
from qsync.lowering.vectorized import Tabulated
from qsync.predictor.memory.peak import Memory, StepMemory
from qsync.predictor.memory.vectorized_peak import vectorized_peak_bytes
from qsync.records.precision import Precision
from qsync.replayer import ClassCosts, Work, step_time
from qsync.replayer.vectorized_costs import price

# Where more operators than this have changed, memory is worked out anew for the whole graph.
_MANY = 100


@dataclass(frozen=True, slots=True)
class Move:
    """Changes of one class that belong together, and what to put back."""

    device_class: str
    assignment: Mapping[str, Precision]
    changes: tuple[Change, ...]
    work: Work | None


class ClassState:
    """One class: its lowering, what it costs, and whether it fits in memory."""

    def __init__(self, problem: Problem, part: ClassProblem, others: Iterable[ClassState] = ()) -> None:
        self.part = part
        self._exchange, self._num_ranks = problem.exchange, problem.cluster.num_ranks
        # What another class begins with as well is looked at once.
        like = next((one for one in others if _begin_alike(one.part, part)), None)
        if like is None:
            self.lowering = Lowering(
                part.graph, part.highest, part.device_class.carried_16bit, part.saving_less
            )
            self._memory = StepMemory(
                self.lowering.lowered(),
                optimizer_bytes=part.profile.optimizer_bytes,
                num_ranks=self._num_ranks,
                device=part.device_class.device,
            )
        else:
            self.lowering = like.lowering.copy(part.device_class.carried_16bit)
            self._memory = like._memory.copy(part.profile.optimizer_bytes)
        # Whether memory rules out what adds least variance: only then does a search have to look at bytes.
        self.is_tight = self._memory.peak_bytes > part.budget_bytes
        self.costs = ClassCosts(self.lowering, part.profile)
        self._work: Work | None = None  # not asked for since the last change
        self._beside_s = self.work.total_s - self.costs.total_s
        self._stale: set[int] = set()  # operators changed since memory was last looked at
        self._peak_bytes: int | None = None
        self.known_s: dict[tuple[tuple[int, Precision], ...], float] = {}

    def precision(self, op: str) -> Precision:
        return self.lowering.precision[self.lowering.position[op]]

    def changed(self, positions: Iterable[int]) -> None:
        """Price the operators at these positions again; memory is looked at only when it is asked for."""
        positions = tuple(positions)
        self.costs.update(positions)
        self._stale.update(positions)
        self._peak_bytes = None

    @cached_property
    def _repeats(self) -> Repeats:
        return Repeats(self.lowering.graph, self.part)

    def places(self) -> dict[str, int]:
        """Operator -> its place: what finds the same around itself has the same place (`Repeats`)."""
        found = self._repeats.places(self.lowering.precision)
        return {self.lowering.graph.ops[i].name: place for i, place in found.items()}

    @property
    def work(self) -> Work:
        """The class's step as it is now."""
        if self._work is None:
            self._work = self._exchange.work(self.costs)
        return self._work

    def work_was(self, work: Work | None) -> Work | None:
        """Set what the class's step is, None if that is not known yet; what it was."""
        self._work, before = work, self._work
        return before

    @property
    def alone_s(self) -> float:
        """Seconds of the class's own step, as in `work` but at less cost: no step is shorter."""
        return self.costs.total_s + self._beside_s

    def seconds_at(self, assignment: Mapping[str, Precision]) -> float:
        """What `costs.total_s` is at another assignment, to the last digits."""
        part = self.part
        narrow = part.device_class.carried_16bit
        lowered = Tabulated(part.graph, part.with_partners(assignment), narrow, part.saving_less)
        priced = price(lowered, part.profile)
        return float(priced.forward_s.sum() + priced.backward_s.sum())

    @property
    def peak_bytes(self) -> int:
        """The memory peak as it is now."""
        if self._peak_bytes is None and len(self._stale) > _MANY:
            device, lowering = self.part.device_class, self.lowering
            self._peak_bytes = vectorized_peak_bytes(
                Tabulated(lowering.graph, lowering.assignment(), device.carried_16bit, self.part.saving_less),
                optimizer_bytes=self.part.profile.optimizer_bytes,
                num_ranks=self._num_ranks,
                device=device.device,
            )
        elif self._peak_bytes is None:
            self._look_again()
            self._peak_bytes = self._memory.peak_bytes
        return self._peak_bytes

    def bytes_at(self, when: int | None = None) -> tuple[int, int]:
        """A time of the step, that of the peak if None, and the bytes in use then, margin included."""
        self._look_again()
        return self._memory.bytes_at(when)

    def in_use(self) -> npt.NDArray[np.int64]:
        """Bytes in use at each time of the step, margin included."""
        self._look_again()
        return self._memory.in_use()

    def memory(self) -> Memory:
        """What the memory is used for at its peak."""
        self._look_again()
        return self._memory.at_peak()

    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.part.budget_bytes

    def _look_again(self) -> None:
        self._memory.update(self.lowering, sorted(self._stale))
        self._stale.clear()

    @property
    def variance(self) -> float:
        """What this class adds to the variance of the averaged gradient: (n_c / N^2) sum of omega."""
        return sum(self.part.variance[op][self.precision(op)] for op in self.part.choices)


class State:
    """The assignment of all classes. Starts with every operator at its highest precision."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.classes: dict[str, ClassState] = {}
        for name, part in problem.classes.items():
            self.classes[name] = ClassState(problem, part, self.classes.values())

        self.late: dict[str, float] = {}  # by class: the part of its time by which it may be late

    def move(self, device_class: str, assignment: Mapping[str, Precision]) -> Move:
        """Give some operators of one class other precisions; `back` undoes it exactly."""
        state, changes = self.classes[device_class], []
        for op, precision in state.part.with_partners(assignment).items():
            if state.precision(op) is not precision:
                change = state.lowering.assign(op, precision)
                state.changed(change.touched)
                changes.append(change)
        work = state.work_was(None) if changes else None
        return Move(device_class, assignment, tuple(changes), work)

    def back(self, move: Move) -> None:
        """Undo the last move not yet undone."""
        state = self.classes[move.device_class]
        for change in reversed(move.changes):
            state.lowering.undo(change)
            state.changed(change.touched)
        if move.changes:
            state.work_was(move.work)

    def seconds_of(
        self, device_class: str, changed: Mapping[str, Precision], places: Mapping[str, int]
    ) -> float:
        """By how many seconds other precisions change the class's own step; `places` is where all stand now.

        Asked once for operators that find the same around themselves.
        """
        state = self.classes[device_class]
        everyone = state.part.with_partners(changed)
        key = tuple((places[op], precision) for op, precision in everyone.items())
        if key not in state.known_s:
            now = state.costs.total_s
            move = self.move(device_class, changed)
            state.known_s[key] = state.costs.total_s - now
            self.back(move)
        return state.known_s[key]

    def step_s(self) -> float:
        """Seconds of the step as replay predicts them."""
        return step_time([state.work for state in self.classes.values()], self.problem.exchange)

    def late_step_s(self) -> float:
        """Seconds of the step if every class is as late as `late` says it may be."""
        works = [state.work.slower(1 + self.late.get(name, 0.0)) for name, state in self.classes.items()]
        return step_time(works, self.problem.exchange)

    @property
    def variance(self) -> float:
        return sum(state.variance for state in self.classes.values())

    def assignments(self) -> dict[str, dict[str, Precision]]:
        return {name: state.lowering.assignment() for name, state in self.classes.items()}

    def restore(self, assignments: Mapping[str, Mapping[str, Precision]]) -> None:
        """Go to these assignments."""
        for name, assignment in assignments.items():
            self.move(name, assignment)


def _begin_alike(one: ClassProblem, other: ClassProblem) -> bool:
    """Whether two classes begin with the same lowered graph on the same kind of device."""
    mine, theirs = one.device_class, other.device_class
    if mine.device != theirs.device or one.graph is not other.graph or one.highest != other.highest:
        return False
    if one.saving_less != other.saving_less:
        return False
    # Only 8-bit operators hand on the device's 16-bit float.
    return mine.carried_16bit == theirs.carried_16bit or not set(EIGHT_BIT) & set(one.highest.values())

"""The assignment of every class during a search, with changes that can be undone exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.allocator.block_levers import KEEP, Treatment
from qsync.allocator.problem import ClassProblem, Problem
from qsync.lowering.incremental import Change, Lowering
from qsync.operators.precision import EIGHT_BIT, Precision
from qsync.predictor.memory.peak import Memory, peak_memory
from qsync.predictor.memory.vectorized_peak import vectorized_bytes
from qsync.replayer import ClassCosts, Work, starts_s, step_time


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a class's assignment, with the records to undo it."""

    device_class: str
    assignment: Mapping[str, Precision]
    change: Change | None
    work: Work | None


class ClassState:
    """One class: its lowering, its costs, and whether it fits in memory."""

    def __init__(
        self,
        problem: Problem,
        part: ClassProblem,
        others: Iterable[ClassState],
        treatment: Treatment | None = None,
    ) -> None:
        self.part = part
        self.treatment = (KEEP,) * len(part.blocks) if treatment is None else treatment
        self._exchange, self._num_ranks = problem.exchange, problem.cluster.num_ranks
        # Classes with equal initial assignments copy one lowering, which saves time.
        like = next((one for one in others if _start_equal(one.part, part)), None)
        if like is None:
            self.lowering = Lowering(
                part.graph, part.highest, part.device_class.carried_16bit, part.saving_less
            )
        else:
            self.lowering = like.lowering.copy(part.device_class.carried_16bit)
        self._peak_bytes: int | None = None  # None: not computed since the last change
        # Whether the assignment of least variance exceeds memory; if so, programs start with a memory row.
        self.is_tight = not self.fits()
        if treatment is None and not self.is_tight:  # levers of blocks only save memory
            self.part, self.treatment = replace(part, blocks=()), ()
        self.costs = ClassCosts(self.lowering, part.profile)
        self._work: Work | None = None
        self._beside_s = self.work.total_s - self.costs.total_s

    def precision(self, op: str) -> Precision:
        """Return the current precision of an operator."""
        return self.lowering.precision(self.lowering.position[op])

    def changed(self, positions: Sequence[int]) -> None:
        """Update the prices of operators at these positions, and discard the cached memory peak."""
        self.costs.update(positions)
        self._peak_bytes = None

    @property
    def work(self) -> Work:
        """Return the class's work in a step under the current assignment."""
        if self._work is None:
            self._work = self._exchange.work(self.costs, self.part.device_class.name)
        return self._work

    def work_was(self, work: Work | None) -> Work | None:
        """Replace the cached work of the class (None: not computed); return the former work."""
        self._work, before = work, self._work
        return before

    @property
    def alone_s(self) -> float:
        """Return the class's seconds without communication: a lower bound of the step, cheap to compute."""
        if self.costs.launches is not None:  # waits for launches do not add up
            return self.work.total_s
        return self.costs.total_s + self._beside_s

    @property
    def own_s(self) -> float:
        """Return the seconds that rank assignments: of operators, or with launches of the whole step."""
        return self.costs.total_s if self.costs.launches is None else self.work.total_s

    def seconds_at(self, assignment: Mapping[str, Precision]) -> float:
        """Return `own_s` under another assignment, up to rounding, without changing the state."""
        part = self.part
        type_16bit = part.device_class.carried_16bit
        lowering = Lowering(part.graph, part.with_partners(assignment), type_16bit, part.saving_less)
        costs = ClassCosts(lowering, part.profile)
        return (
            costs.total_s
            if costs.launches is None
            else self._exchange.work(costs, part.device_class.name).total_s
        )

    @property
    def peak_bytes(self) -> int:
        """Return the memory peak in bytes under the current assignment."""
        if self._peak_bytes is None:
            self._peak_bytes = int(self.bytes_by_time().max())
        return self._peak_bytes

    def bytes_by_time(self) -> npt.NDArray[np.int64]:
        """Return the bytes in use, with margin, at each time of the step."""
        return vectorized_bytes(self.lowering, **self._of_memory)

    def memory(self) -> Memory:
        """Return the memory at the peak, by use."""
        return peak_memory(self.lowering.lowered(), **self._of_memory)

    @property
    def _of_memory(self) -> dict[str, Any]:
        profile, device = self.part.profile, self.part.device_class.device
        return {
            "optimizer_bytes": profile.optimizer_bytes,
            "optimizer_workspace": profile.optimizer_workspace_bytes, "num_ranks": self._num_ranks,
            "device": device, "residuals": profile.memory_residuals,
        }  # fmt: skip

    def fits(self) -> bool:
        """Return whether the memory peak is within the class's budget."""
        return self.peak_bytes <= self.part.budget_bytes

    @property
    def variance(self) -> float:
        """Return the variance that this class adds to the average gradient: (n_c / N^2) sum of omega."""
        return sum(self.part.variance[op][self.precision(op)] for op in self.part.choices)

    def added_by(self, changed: Mapping[str, Precision]) -> float:
        """Return the change of variance under other precisions of some operators (negative: regained)."""
        variance = self.part.variance
        return sum(variance[op][p] - variance[op][self.precision(op)] for op, p in changed.items())


class State:
    """The assignment of all classes; every operator starts in its highest precision."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.classes: dict[str, ClassState] = {}
        for name, part in problem.classes.items():
            self.classes[name] = ClassState(problem, part, self.classes.values())
        self.late: dict[str, float] = {}  # class -> margin, as a fraction of its compute time
        self._treated = {(name, one.treatment): one for name, one in self.classes.items()}

    def plain(self, device_class: str) -> ClassState:
        """Return a class without block levers, in whatever assignment it had then."""
        return self._treated[device_class, (KEEP,) * len(self.classes[device_class].part.blocks)]

    def treat(self, device_class: str, treatment: Treatment) -> None:
        """Give the blocks of a class these levers, at its current assignment. No move undoes it."""
        before, key = self.classes[device_class], (device_class, treatment)
        if treatment == before.treatment:
            return
        if key not in self._treated:
            plain = self.plain(device_class)
            part = plain.part.under(self.problem.graph, treatment)
            self._treated[key] = ClassState(self.problem, part, (), treatment)
            self._treated[key].is_tight = plain.is_tight
        self.classes[device_class] = self._treated[key]
        self.move(device_class, before.lowering.assignment())

    def move(self, device_class: str, assignment: Mapping[str, Precision]) -> Move:
        """Assign other precisions to operators of one class; `back` undoes the move exactly."""
        state = self.classes[device_class]
        whole = state.part.with_partners(assignment).items()
        others = {op: precision for op, precision in whole if state.precision(op) is not precision}
        if not others:
            return Move(device_class, assignment, None, None)
        change = state.lowering.assign_all(others)
        state.changed(change.touched)
        return Move(device_class, assignment, change, state.work_was(None))

    def back(self, move: Move) -> None:
        """Undo a move; moves must be undone in reverse order."""
        state = self.classes[move.device_class]
        if move.change is not None:
            state.lowering.undo(move.change)
            state.changed(move.change.touched)
            state.work_was(move.work)

    @contextmanager
    def tried(
        self, device_class: str, assignment: Mapping[str, Precision], treatment: Treatment
    ) -> Iterator[ClassState]:
        """Give a class an assignment and levers within the context, and restore it exactly."""
        before = self.classes[device_class]
        self.treat(device_class, treatment)
        move = self.move(device_class, assignment)
        try:
            yield self.classes[device_class]
        finally:
            self.back(move)
            self.classes[device_class] = before

    def step_s(self) -> float:
        """Return the seconds of the step as replay predicts them."""
        return step_time([state.work for state in self.classes.values()], self.problem.exchange)

    def late_step_s(self) -> float:
        """Return the seconds of the step with every class slower by its margin."""
        return step_time(list(self.late_works().values()), self.problem.exchange)

    def late_works(self) -> dict[str, Work]:
        """Return each class's work, slower by the class's margin."""
        return {name: state.work.slower(self.late_factor(name)) for name, state in self.classes.items()}

    def late_starts(self, least: bool = False) -> dict[str, tuple[Work, float]]:
        """Return each class's work with its margin (`late_works`), and the second at which it starts.

        On a device with launches, the previous optimizer may wait for its launch, depending on the
        assignment. `least` leaves that wait out, for a lower bound of the start under any assignment.
        """
        works = self.late_works()
        for name, one in self.classes.items() if least else ():
            if one.costs.launches is not None:
                optimizer_s = self.late_factor(name) * one.part.profile.optimizer_s
                works[name] = replace(works[name], optimizer_s=optimizer_s)
        starts = starts_s(list(works.values()), self.problem.exchange)
        return {name: (work, start_s) for (name, work), start_s in zip(works.items(), starts, strict=True)}

    def late_factor(self, name: str) -> float:
        """Return 1 plus the margin of a class, the factor on its compute time."""
        return 1.0 + self.late.get(name, 0.0)

    @property
    def variance(self) -> float:
        """Return the variance that all classes add to the average gradient."""
        return sum(state.variance for state in self.classes.values())

    def assignments(self) -> dict[str, dict[str, Precision]]:
        """Return the current assignment of every class."""
        return {name: state.lowering.assignment() for name, state in self.classes.items()}

    def treatments(self) -> dict[str, Treatment]:
        """Return the current levers of every class's blocks."""
        return {name: state.treatment for name, state in self.classes.items()}

    def restore(
        self,
        assignments: Mapping[str, Mapping[str, Precision]],
        treatments: Mapping[str, Treatment] | None = None,
    ) -> None:
        """Assign these precisions, and levers of blocks, to the classes."""
        for name, treatment in (treatments or {}).items():
            self.treat(name, treatment)
        for name, assignment in assignments.items():
            self.move(name, assignment)


def _start_equal(one: ClassProblem, other: ClassProblem) -> bool:
    """Return whether two classes start with the same lowered graph."""
    if one.graph is not other.graph or one.highest != other.highest or one.saving_less != other.saving_less:
        return False
    # The 16-bit type of the device matters only if some operator has 8 bits.
    same = one.device_class.carried_16bit == other.device_class.carried_16bit
    return same or not set(EIGHT_BIT) & set(one.highest.values())

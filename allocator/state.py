"""The assignment of every class during a search: a few operators change at a time, and come back exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync.allocator.problem import ClassProblem, Problem
from qsync.graph import OpGraph
from qsync.lowering import Change, Lowering
from qsync.precision import Precision
from qsync.predictor.memory import Memory, peak_memory
from qsync.replayer import ClassCosts, Work, step_time

# Most bytes per element by which one operator's change can move the peak, for each tensor it reads or writes:
# the value in every type it may be carried and cast to, its gradient, and what its operator keeps beside it.
_BYTES_PER_ELEMENT = 32


@dataclass(frozen=True, slots=True)
class Move:
    """Changes of one class that belong together, and what to put back."""

    device_class: str
    changes: tuple[Change, ...]
    work: Work
    margin: int


class ClassState:
    """One class: its lowering, what it costs, and whether it fits in memory."""

    def __init__(self, problem: Problem, part: ClassProblem) -> None:
        self.part = part
        self.num_ranks = problem.cluster.num_ranks
        self.lowering = Lowering(problem.graph, part.highest, part.device_class.narrow)
        self.costs = ClassCosts(self.lowering, part.profile)
        self.work = problem.exchange.work(self.costs)
        self._reach = _reach(problem.graph)
        # Bytes that are certainly free: a lower bound, so that the peak is computed only when the budget may
        # bind.
        self.margin = -1

    def precision(self, op: str) -> Precision:
        return self.lowering.precision[self.lowering.position[op]]

    def spend(self, change: Change) -> None:
        """Lower the bound on what is free by the most that this change can have taken."""
        self.margin -= sum(self._reach[i] for i in change.touched)

    def memory(self) -> Memory:
        """The peak as it is now, computed from scratch."""
        device, optimizer_bytes = self.part.device_class.device, self.part.profile.optimizer_bytes
        return peak_memory(
            self.lowering.lowered(), optimizer_bytes=optimizer_bytes, num_ranks=self.num_ranks, device=device
        )

    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        if self.margin < 0:
            self.margin = self.part.budget_bytes - self.memory().peak_bytes
        return self.margin >= 0

    @property
    def variance(self) -> float:
        """What this class adds to the variance of the averaged gradient: (n_c / N^2) sum of omega."""
        return sum(self.part.variance[op][self.precision(op)] for op in self.part.choices)


class State:
    """The assignment of all classes. Starts with every operator at its highest precision."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.classes = {name: ClassState(problem, part) for name, part in problem.classes.items()}

    def move(self, device_class: str, assignment: Mapping[str, Precision]) -> Move:
        """Give some operators of one class other precisions; `back` undoes it exactly."""
        state = self.classes[device_class]
        work, margin, changes = state.work, state.margin, []
        for op, precision in assignment.items():
            if state.precision(op) is not precision:
                change = state.lowering.assign(op, precision)
                state.costs.update(change.touched)
                state.spend(change)
                changes.append(change)
        if changes:
            state.work = self.problem.exchange.work(state.costs)
        return Move(device_class, tuple(changes), work, margin)

    def back(self, move: Move) -> None:
        """Undo the last move not yet undone."""
        state = self.classes[move.device_class]
        for change in reversed(move.changes):
            state.lowering.undo(change)
            state.costs.update(change.touched)
        state.work, state.margin = move.work, move.margin

    def step_s(self) -> float:
        """Seconds of the step as replay predicts them."""
        return step_time([state.work for state in self.classes.values()], self.problem.exchange)

    @property
    def variance(self) -> float:
        return sum(state.variance for state in self.classes.values())

    def assignments(self) -> dict[str, dict[str, Precision]]:
        return {name: state.lowering.assignment() for name, state in self.classes.items()}

    def restore(self, assignments: Mapping[str, Mapping[str, Precision]]) -> None:
        """Go to these assignments."""
        for name, assignment in assignments.items():
            self.move(name, assignment)


def _reach(graph: OpGraph) -> list[int]:
    """For every operator a bound on the bytes by which changing its node or its casts can move the peak."""
    size = {value.name: value.num_elements for value in graph.inputs}
    reach = []
    for op in graph.ops:
        read = [size[name] for name in (*op.inputs, *op.kept)]
        # A view keeps the whole tensor that it looks into alive.
        size[op.name] = max([op.num_elements, *read]) if op.kind == "view" else op.num_elements
        reach.append(_BYTES_PER_ELEMENT * (size[op.name] + sum(read)))
    return reach

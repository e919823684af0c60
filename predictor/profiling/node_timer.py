"""Times every node of the lowered graph inside a running step, forward and backward.

Forward, a node's time is what passes between the previous node's end and its own: nothing of a graph is left
out but the time it takes to note it down. Backward, autograd runs the recorded functions in reverse order of
creation on one thread, so a node's time is what passes between the moment the gradient of its result is
complete and the moment the next node's is, less what such a look costs, which is measured beforehand.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from qsync.lowering.rules import Cast, Run
from qsync.predictor.profiling.clocks import Clock
from qsync.records.profiles import Cost


@dataclass(slots=True)
class StepTimes:
    """One step, taken apart: per node forward and backward, and what ran outside of the graph. Seconds."""

    nodes: list[tuple[Cast | Run, Cost]]
    before: float
    outside: Cost

    @property
    def total(self) -> float:
        return self.before + self.outside.total_s + sum(cost.total_s for _, cost in self.nodes)


def look_s(clock: Clock, num: int = 200, rounds: int = 5) -> float:
    """Seconds that noting down one function's turn adds to backward, from chains of `num` additions."""

    def chain(looked_at: bool) -> float:
        x = torch.zeros(1, requires_grad=True)
        seen: list[tuple[int, Any]] = []
        for i in range(num):
            x = x + 1
            if looked_at and x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda _, i=i: seen.append((i, clock.now())))
        start = clock.now()
        x.backward()  # type: ignore[no-untyped-call]
        end = clock.now()
        clock.settle()
        return clock.seconds(start, end)

    differences = [(chain(True) - chain(False)) / num for _ in range(rounds)]
    return max(0.0, statistics.median(differences))


@dataclass(slots=True)
class Recorder:
    """An Observer (see qsync.runtime.rewriting) of one step at a time: `start`, the step, `finish`."""

    clock: Clock
    look_s: float = 0.0  # what a look in backward costs: see `look_s`
    _begun: list[tuple[int, Any]] = field(default_factory=list)
    # Each node with the moment of its end, and the moment at which that was noted down.
    _marks: list[tuple[Cast | Run, Any, Any]] = field(default_factory=list)
    _backward: list[tuple[int, Any]] = field(default_factory=list)
    _hooked: set[Any] = field(default_factory=set)
    _start: Any = None
    _loss: Any = None
    _in_backward: bool = False

    def start(self) -> None:
        """Before the model is called."""
        self._begun.clear()
        self._marks.clear()
        self._backward.clear()
        self._hooked.clear()
        self._in_backward = False
        self._start = self.clock.now()

    def began(self) -> None:
        """A traced graph is about to run: what passed since the last node is Python's, not a node's."""
        if not self._in_backward:
            self._begun.append((len(self._marks), self.clock.now()))

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """After a node has run. Recomputation of a checkpointed graph counts as backward of whatever asked
        for it.
        """
        if self._in_backward:
            return
        end = self.clock.now()
        tensor = result[0] if isinstance(result, (tuple, list)) and result else result
        function = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        if function is not None and function not in self._hooked:
            # A call that returned its input (contiguous) brings no function of its own, and no backward time.
            self._hooked.add(function)
            index = len(self._marks)
            function.register_prehook(lambda _, index=index: self._backward.append((index, self.clock.now())))
        self._marks.append((node, end, self.clock.now()))

    def loss_ready(self) -> None:
        """After the loss is computed, before backward."""
        self._loss = self.clock.now()
        self._in_backward = True

    def finish(self, end: Any = None) -> StepTimes:
        """After backward: the step taken apart.

        `end` is when this rank's own last gradient was there, if backward then waited for others.
        """
        end = self.clock.now() if end is None else end
        self.clock.settle()
        between = self.clock.seconds
        if not self._marks:
            raise RuntimeError("no node of the lowered graph ran in this step")
        forward, host = self._forward()
        backward = [0.0] * len(self._marks)
        stamps = [*self._backward, (-1, end)]
        for (index, start), (_, stop) in pairwise(stamps):
            backward[index] += max(0.0, between(start, stop) - self.look_s)
        nodes = [(mark[0], Cost(f, b)) for mark, f, b in zip(self._marks, forward, backward, strict=True)]
        outside = Cost(between(self._marks[-1][2], self._loss), between(self._loss, stamps[0][1]))
        return StepTimes(nodes, host, outside)

    def _forward(self) -> tuple[list[float], float]:
        """Forward seconds of each node, and of what ran before and between the traced graphs."""
        between = self.clock.seconds
        begun = dict(self._begun)
        forward, host, previous = [], 0.0, self._start
        for index, (_, stop, noted) in enumerate(self._marks):
            if index in begun:
                host += between(previous, begun[index])
                previous = begun[index]
            forward.append(between(previous, stop))
            previous = noted
        return forward, host

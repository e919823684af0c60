"""Times every node of the lowered graph inside a running step, forward and backward.

Forward, a node's time is what passes between the previous node's end and its own: nothing of a graph is left
out. Backward, autograd runs the recorded functions in reverse order of creation on one thread, so a node's
time is what passes between the moment the gradient of its result is complete and the moment the next node's
is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from qsync.lowering import Cast, Run
from qsync.predictor.clocks import Clock
from qsync.profiles import Cost


@dataclass(slots=True)
class StepTimes:
    """One step, taken apart: per node forward and backward, and what ran outside of the graph. Seconds."""

    nodes: list[tuple[Cast | Run, Cost]]
    before: float
    outside: Cost
    total: float


@dataclass(slots=True)
class Recorder:
    """An Observer (see qsync.rewriting) of one step at a time: `start`, the step, `finish`."""

    clock: Clock
    _begun: list[tuple[int, Any]] = field(default_factory=list)
    _marks: list[tuple[Cast | Run, Any]] = field(default_factory=list)
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
        for it."""
        if self._in_backward:
            return
        tensor = result[0] if isinstance(result, (tuple, list)) and result else result
        function = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        if function is not None and function not in self._hooked:
            # A call that returned its input (contiguous) brings no function of its own, and no backward time.
            self._hooked.add(function)
            index = len(self._marks)
            function.register_prehook(lambda _, index=index: self._backward.append((index, self.clock.now())))
        self._marks.append((node, self.clock.now()))

    def loss_ready(self) -> None:
        """After the loss is computed, before backward."""
        self._loss = self.clock.now()
        self._in_backward = True

    def finish(self) -> StepTimes:
        """After backward: the step taken apart."""
        end = self.clock.now()
        self.clock.settle()
        between = self.clock.seconds
        if not self._marks:
            raise RuntimeError("no node of the lowered graph ran in this step")
        forward, host = self._forward()
        backward = [0.0] * len(self._marks)
        stamps = [*self._backward, (-1, end)]
        for (index, start), (_, stop) in pairwise(stamps):
            backward[index] += between(start, stop)
        nodes = [(node, Cost(f, b)) for (node, _), f, b in zip(self._marks, forward, backward, strict=True)]
        outside = Cost(between(self._marks[-1][1], self._loss), between(self._loss, stamps[0][1]))
        return StepTimes(nodes, host, outside, between(self._start, end))

    def _forward(self) -> tuple[list[float], float]:
        """Forward seconds of each node, and of what ran before and between the traced graphs."""
        between = self.clock.seconds
        begun = dict(self._begun)
        forward, host, previous = [], 0.0, self._start
        for index, (_, mark) in enumerate(self._marks):
            if index in begun:
                host += between(previous, begun[index])
                previous = begun[index]
            forward.append(between(previous, mark))
            previous = mark
        return forward, host

"""A timer of every node of the lowered graph inside a running step, forward and backward.

In forward, a node's time runs from the previous node's end to its own end. Only the time for taking the marks
is left out. In backward, autograd runs the recorded functions in reverse order of creation, on one thread. A
node's backward time starts when the gradient of its result is complete. It ends when the gradient of the next
node's result is complete. The measured cost of a timing hook is subtracted.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch

from qsync.errors import not_called
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.profiling.clocks import Clock
from qsync.records.profiles import Cost


@dataclass(slots=True)
class StepTimes:
    """The seconds of one step: of each node, of the host around the graphs, and of the loss (`outside`)."""

    nodes: list[tuple[Cast | Run, Cost]]
    host_s: float
    outside: Cost

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole step."""
        return self.host_s + self.outside.total_s + sum(cost.total_s for _, cost in self.nodes)


def timing_hook_s(clock: Clock, num: int = 200, rounds: int = 5) -> float:
    """Measure the seconds that one timing hook adds to backward, on chains of `num` additions."""

    def chain(hooked: bool) -> float:
        x = torch.zeros(1, requires_grad=True)
        seen: list[tuple[int, Any]] = []
        for i in range(num):
            x = x + 1
            if hooked and x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda _, i=i: seen.append((i, clock.now())))
        start = clock.now()
        x.backward()  # type: ignore[no-untyped-call]
        end = clock.now()
        clock.settle()
        return clock.seconds(start, end)

    differences = [(chain(True) - chain(False)) / num for _ in range(rounds)]
    return max(0.0, statistics.median(differences))


@dataclass(slots=True)
class NodeTimer:
    """An Observer (see qsync.runtime.rewriting) of one step at a time: `start`, the step, `finish`."""

    only_times: ClassVar[bool] = True
    clock: Clock
    hook_s: float = 0.0  # seconds of a timing hook in backward (`timing_hook_s`)
    _begun: list[tuple[int, Any]] = field(default_factory=list)
    # Each node with the instant of its end, and the instant at which the mark was taken.
    _marks: list[tuple[Cast | Run, Any, Any]] = field(default_factory=list)
    _backward: list[tuple[int, Any]] = field(default_factory=list)
    _hooked: set[int] = field(default_factory=set)  # sequence numbers: a reference would keep saved tensors
    _start: Any = None
    _loss: Any = None
    _in_backward: bool = False

    def start(self) -> None:
        """Start the timing of a step; call it before the model."""
        self._begun.clear()
        self._marks.clear()
        self._backward.clear()
        self._hooked.clear()
        self._in_backward = False
        self._start = self.clock.now()

    def began(self) -> None:
        """Mark the start of a traced graph; the time since the last node belongs to the host."""
        if not self._in_backward:
            self._begun.append((len(self._marks), self.clock.now()))

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Mark the end of a node's forward.

        A checkpointed graph runs again in backward. The second run counts as backward of the node that needs
        it.
        """
        if self._in_backward:
            return
        end = self.clock.now()
        tensor = result[0] if isinstance(result, (tuple, list)) and result else result
        function = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        if function is not None and (number := function._sequence_nr()) not in self._hooked:
            # A call that returned its input (contiguous) has no autograd function, and no backward time.
            self._hooked.add(number)
            index = len(self._marks)

            def begins(_: Any, index: int = index) -> None:
                if self._in_backward:  # not if the loss computes gradients in forward
                    self._backward.append((index, self.clock.now()))

            function.register_prehook(begins)
        self._marks.append((node, end, self.clock.now()))

    def loss_ready(self) -> None:
        """Mark the end of forward; call it between loss and backward."""
        self._loss = self.clock.now()
        self._in_backward = True

    def finish(self, end: Any = None) -> StepTimes:
        """Return the times of the step; call it after backward.

        `end` marks this rank's own last gradient, if backward then waited for other ranks.
        """
        end = self.clock.now() if end is None else end
        self.clock.settle()
        between = self.clock.seconds
        if not self._marks:
            raise not_called()
        forward, host = self._forward()
        backward = [0.0] * len(self._marks)
        stamps = [*self._backward, (-1, end)]
        for (index, start), (_, stop) in pairwise(stamps):
            backward[index] += max(0.0, between(start, stop) - self.hook_s)
        nodes: dict[Any, tuple[Cast | Run, Cost]] = {}
        for (node, *_), f, b in zip(self._marks, forward, backward, strict=True):
            # If a step calls the model several times, a node's times add up.
            key = node.op if isinstance(node, Run) else node.profile_key
            first, before = nodes.get(key, (node, Cost(0.0, 0.0)))
            nodes[key] = (first, Cost(before.forward_s + f, before.backward_s + b))
        outside = Cost(between(self._marks[-1][2], self._loss), between(self._loss, stamps[0][1]))
        return StepTimes(list(nodes.values()), host, outside)

    def _forward(self) -> tuple[list[float], float]:
        """Return the forward seconds of each node, and the seconds before and between the traced graphs."""
        between = self.clock.seconds
        begun = dict(self._begun)
        forward, host, previous = [], 0.0, self._start
        for index, (_, stop, marked) in enumerate(self._marks):
            if index in begun:
                host += between(previous, begun[index])
                previous = begun[index]
            forward.append(between(previous, stop))
            previous = marked
        return forward, host

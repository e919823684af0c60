"""The measured memory of one step at each operator, and its residuals against the prediction.

The prediction covers the tensors that operators save. It does not cover the scratch memory of every kernel on
every processor, a loss outside the graph, or untraced code. The bytes of one step of each precision beyond
the prediction are added to the prediction of every plan (`MemoryResiduals`).

Times are those of `qsync.predictor.memory.lifetimes`: operator i of n runs forward at i and backward at
2n - i, the loss at n. With M the most bytes in use at a time, E the bytes at its end, U the predicted most,
and P the predicted bytes that stay alive:

    residual saved by i   = (E - P at i) - (E - P at i - 1)
    residual of forward   = (M - U at i) - saved by operators up to i
    residual of backward  = (M - U at 2n - i) - saved by operators up to i

So the prediction of a uniform precision equals the measurement, and a mixed plan adds the residual of each
operator in its own precision. A precision whose peak was predicted well has no residuals: the model is then
more reliable than one step, whose bytes are attributed to times only. Source: the events of torch's
allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import record_function

from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.predictor.memory.layout import layout
from qsync.predictor.memory.peak import StepMemory
from qsync.predictor.profiling.allocator_events import ALLOCATOR, allocator_events
from qsync.predictor.profiling.runner import Choose, Runner
from qsync.records.graph import OpGraph
from qsync.records.memory_residuals import MemoryResiduals, Residual

Ints = npt.NDArray[np.int64]

# Relative errors of a predicted peak (too small, too large) up to which it gets no residuals.
_TOO_SMALL, _TOO_LARGE = 0.01, 0.05
_MARK = "qsync: time "  # prefix of the events that separate allocator events by time


@dataclass(slots=True)
class StepBytes:
    """Bytes in use at each time of a step, relative to its start: the most, and at the time's end.

    A time without any event has the values of the time before.
    """

    most: Ints
    at_end: Ints


@dataclass(slots=True)
class TimeMarks:
    """An Observer (see qsync.runtime.node_calls) that marks the times of a step in torch's events."""

    only_times: ClassVar[bool] = True
    graph: OpGraph
    # Whether the step runs an operator twice (the loss calls the model several times), or an unknown one.
    differs: bool = False
    _position: dict[str, int] = field(init=False)
    _seen: set[str] = field(default_factory=set)
    _hooked: set[int] = field(default_factory=set)  # sequence numbers of autograd functions
    _in_backward: bool = False

    def __post_init__(self) -> None:
        self._position = {op.name: i for i, op in enumerate(self.graph.ops)}

    def began(self) -> None:
        """Do nothing: code between two operators counts for the second operator."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Mark the end of an operator's forward, and later the start of its backward.

        A checkpointed graph runs forward again in backward, which counts as backward of its readers.
        """
        if self._in_backward or not isinstance(node, Run):
            return
        i = self._position.get(node.op)
        if i is None or node.op in self._seen:
            self.differs = True
            return
        self._seen.add(node.op)
        mark(i + 1)
        tensor = result[0] if isinstance(result, (tuple, list)) and result else result
        function = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
        if function is not None and (number := function._sequence_nr()) not in self._hooked:
            self._hooked.add(number)
            function.register_prehook(lambda _: self._begins(2 * len(self.graph.ops) - i))

    def _begins(self, time: int) -> None:
        """Mark the start of an operator's backward, unless the loss itself computes gradients in forward."""
        if self._in_backward:
            mark(time)

    def loss_ready(self) -> None:
        """Record that forward has ended."""
        self._in_backward = True


def measure_residuals(
    runner: Runner,
    assignments: Iterable[Choose],
    loss: Callable[[], torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
) -> MemoryResiduals:
    """Run a step of each assignment, and return the residuals of its memory against the prediction.

    Each assignment must have run before, with an optimizer step since. The result is empty on a GPU, inside a
    profiler of the user, if the loss calls the model several times, and if steps run different operators.
    """
    graph, found = runner.graph, []
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    if not on_cpu or not graph.adjustable or torch._C._autograd._profiler_enabled():
        return MemoryResiduals()
    for choose in assignments:
        marks = TimeMarks(graph)
        runner.choose(choose, marks)
        traced = trace_memory(marks, loss, parameters)
        if marks.differs:
            return MemoryResiduals()
        found.append(residuals_of(traced, lower(graph, choose(graph))))
    return MemoryResiduals.joined(found)


def mark(time: int) -> None:
    """Mark the start of a time in torch's events."""
    with record_function(f"{_MARK}{time}"):
        pass


def trace_memory(
    marks: TimeMarks, loss: Callable[[], torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> StepBytes:
    """Run forward and backward under the marks, with gradients allocated; return the bytes in use.

    Each gradient is computed and then added to the existing one, as in DDP, whose buckets hold them.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        with allocator_events(_MARK) as events:
            value = loss()
            marks.loss_ready()
            value.backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter in parameters:
            parameter.grad = None
    return _by_time(events, 2 * len(marks.graph.ops) + 1)


@contextmanager
def optimizer_workspace(device: torch.device) -> Iterator[list[int]]:
    """Measure the most bytes in use within the context beyond those at its start; append them to the list.

    On a GPU this resets torch's peak statistics. Inside a profiler of the user nothing is appended.
    """
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
    elif torch._C._autograd._profiler_enabled():
        yield found
    else:
        with allocator_events() as events:
            yield found
        found.append(int(np.cumsum([0, *(num_bytes for _, num_bytes in events)]).max()))


def _by_time(events: Sequence[tuple[str, int]], num_times: int) -> StepBytes:
    most, at_end = np.full((2, num_times), np.iinfo(np.int64).min)
    time = in_use = most[0] = at_end[0] = 0
    for name, num_bytes in events:
        if name == ALLOCATOR:
            in_use += num_bytes
        else:
            time = int(name.removeprefix(_MARK))
        most[time], at_end[time] = max(most[time], in_use), in_use
    seen = at_end > np.iinfo(np.int64).min
    last = np.maximum.accumulate(np.where(seen, np.arange(num_times), 0))
    return StepBytes(np.where(seen, most, at_end[last]), at_end[last])


def residuals_of(found: StepBytes, lowered: LoweredGraph) -> MemoryResiduals:
    """Return the residuals of a step's bytes against the prediction; empty if the peaks agree."""
    predicted, num = StepMemory(lowered, num_ranks=2), len(lowered.graph.ops)
    most, staying = predicted.come_and_go(), predicted.staying()
    highest, measured = int(most.max()), int(found.most.max())
    if (1 - _TOO_SMALL) * measured <= highest <= (1 + _TOO_LARGE) * measured:
        return MemoryResiduals()
    beyond = found.most - most
    kept = (found.at_end - staying)[:num]  # residual bytes saved by operators 0 to i
    saved = np.diff(kept, prepend=0)
    forward, backward = beyond[:num] - kept, beyond[:num:-1] - kept
    modes = [node.mode for node in lowered.nodes if isinstance(node, Run)]
    ops = {
        op.name: {modes[product]: Residual(int(saved[i]), int(forward[i]), int(backward[i]))}
        for i, (op, product) in enumerate(zip(lowered.graph.ops, layout(lowered.graph).product, strict=True))
        if saved[i] or forward[i] or backward[i]
    }
    return MemoryResiduals(ops, Residual(forward=int(beyond[num] - kept[-1])))

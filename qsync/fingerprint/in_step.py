"""Compare operators inside a step with the same operators alone, and measure why they differ.

Alone, an operator repeats with warm caches, recycled memory and values in the order in which they were
traced. Each cause is measured by itself:

    layout  alone, with the strides that values and gradients have in the step, beside those traced
    caches  the same after the caches were emptied
    pages   page faults in the step beyond those alone, times the seconds of one
    clock   a product that stays in registers, between the step's operators beside alone

Seconds are CPU time of this thread.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsync.backend import Kernels
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.operators.precision import Precision
from qsync.predictor.profiling.clocks import FaultClock, ShareClock
from qsync.predictor.profiling.node_timer import NodeTimer, timing_hook_s
from qsync.predictor.profiling.runner import Choose
from qsync.records.fingerprint import Gap
from qsync.runtime.operator_timing import Part, Strides
from qsync.runtime.program import Program

_LEAST_SHARE = 0.01  # of a step, that operators of a shape must take to be compared
_ROUNDS = 5
_EVICTING_BYTES = 2**27  # read and written to empty the caches

Totals = dict[Any, float]  # operator, or (value, type) of a cast -> seconds or page faults of a step


@dataclass(frozen=True, slots=True)
class Steps:
    """The training steps of a program whose model is traced as one graph."""

    program: Program
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer

    def begin(self, choose: Choose, observer: Any = None) -> None:
        """Choose the assignment of the next steps, and run one, since the first takes longer."""
        self.program.choose(choose, observer)
        self.run(observer if isinstance(observer, NodeTimer) else None)

    def run(self, timer: NodeTimer | None = None) -> Totals:
        """Run a step; return what a timer counts of each node."""
        if timer is not None:
            timer.start()
        value = self.loss()
        if timer is not None:
            timer.loss_ready()
        value.backward()  # type: ignore[no-untyped-call]
        nodes = timer.finish().nodes if timer is not None else ()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {_key(node): cost.total_s for node, cost in nodes}

    def seconds(self) -> float:
        """Return the seconds of a step."""
        return _seconds(self.run)


class _Probe:
    """An observer that notes strides, and times a small product between operators."""

    def __init__(self) -> None:
        self.strides: dict[tuple[str, bool], tuple[int, ...]] = {}
        self.clock_s: list[float] = []
        self._square = torch.randn(48, 48)

    def began(self) -> None:
        """Do nothing."""

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Note the result's strides and, in backward, those of its gradient."""
        if not isinstance(node, Run) or not isinstance(result, torch.Tensor):
            return
        self.strides[node.op, False] = result.stride()
        if result.requires_grad:
            self._note_gradient(node.op, result)
        self.clock_s.append(self.product_s())

    def _note_gradient(self, op: str, result: Any) -> None:
        result.register_hook(lambda gradient: self.strides.__setitem__((op, True), gradient.stride()))

    def product_s(self) -> float:
        """Return the least seconds of the small product, whose operands are in the first cache."""
        with torch.no_grad():
            return min(_seconds(lambda: self._square @ self._square) for _ in range(4))


def gaps_of(steps: Steps, choose: Choose) -> list[Gap]:
    """Return the operators of a step beside themselves alone, those that take most time first.

    Operators of one shape are one entry. Steps and operators alone take turns.
    """
    probe, clock, pages = _Probe(), ShareClock(1.0), FaultClock()
    steps.begin(choose, probe)
    (segment,), (lowered,) = steps.program.segments, steps.program.lowered
    part, kernels = Part(segment, lowered), steps.program.kernels
    modes = {node.op: node.mode for node in lowered.nodes if isinstance(node, Run)}
    alike: dict[Any, list[str]] = defaultdict(list)
    for op in lowered.graph.adjustable:
        if part.members(op.name):
            alike[modes[op.name], part.description([op.name])].append(op.name)
    alone = [_Alone(part, ops, Precision(mode), kernels, probe.strides) for (mode, _), ops in alike.items()]
    timers = NodeTimer(pages), NodeTimer(clock, timing_hook_s(clock))
    evicting = torch.zeros(_EVICTING_BYTES // 4)
    faults, seconds = list[Totals](), list[Totals]()
    clock_s, page_s = list[float](), list[float]()
    for _ in range(_ROUNDS):
        for found, timer in zip((faults, seconds), timers, strict=True):
            steps.begin(choose, timer)
            found.append(steps.run(timer))
        clock_s.append(probe.product_s())
        page_s.append(_page_s())
        for each in alone:
            each.measure(lambda: evicting.add_(1.0))
    slower = statistics.median(probe.clock_s) / statistics.median(clock_s) - 1.0
    whole_s = statistics.median(sum(step.values()) for step in seconds)
    gaps = []
    for each in alone:
        keys = [_keys(lowered, part.members(op)) for op in each.ops]
        own_s, own_faults = (
            statistics.median(statistics.fmean(sum(step.get(key, 0.0) for key in own) for own in keys)
                              for step in of)
            for of in (seconds, faults)
        )  # fmt: skip
        if len(keys) * own_s >= _LEAST_SHARE * whole_s:
            warm_s, alone_faults, laid_out_s, cold_s = map(
                statistics.median, zip(*each.measured, strict=True)
            )
            pages_s = statistics.median(page_s) * (own_faults - alone_faults)
            causes = {"layout": laid_out_s - warm_s, "caches": cold_s - laid_out_s, "pages": pages_s,
                      "clock": slower * warm_s}  # fmt: skip
            named = _named(lowered, part.members(each.ops[0]))
            gaps.append(Gap(each.mode, named, len(keys), own_s, warm_s, causes))
    return sorted(gaps, key=lambda gap: -gap.count * gap.in_step_s)


class _Alone:
    """Operators of one shape, of which the first runs alone with its followers."""

    def __init__(
        self, part: Part, ops: Sequence[str], precision: Precision, kernels: Kernels, strides: Strides
    ) -> None:
        self.ops, self.mode, self.measured = ops, str(precision), list[tuple[float, ...]]()
        self._traced = part.pass_of(ops[:1], precision, kernels)
        self._laid_out = part.pass_of(ops[:1], precision, kernels, strides)

    def measure(self, evict: Callable[[], object]) -> None:
        """Time a run as traced, with its page faults, one laid out as in the step, and one in cold caches."""
        self._traced()
        warm_s = list[float]()
        faults = _faults(lambda: warm_s.append(_seconds(self._traced)))
        self._laid_out()
        laid_out_s = _seconds(self._laid_out)
        evict()
        self.measured.append((*warm_s, faults, laid_out_s, _seconds(self._laid_out)))


def _key(node: Cast | Run) -> Any:
    return node.op if isinstance(node, Run) else (node.value, node.target)


def _keys(lowered: LoweredGraph, members: Iterable[str]) -> set[Any]:
    """Return the keys of operators and of the casts of what they read."""
    ops = {op.name: op for op in lowered.graph.ops}
    runs = [node for node in lowered.nodes if isinstance(node, Run) and node.op in set(members)]
    read = {
        (value, taken) for run in runs for value, taken in zip(ops[run.op].inputs, run.operands, strict=True)
    }
    casts = {_key(node) for node in lowered.nodes if isinstance(node, Cast)}
    return {run.op for run in runs} | (read & casts)


def _named(lowered: LoweredGraph, members: Iterable[str]) -> str:
    """Describe operators by kinds and the shapes that the first reads."""
    ops = {op.name: op for op in lowered.graph.ops}
    shapes = {value.name: value.shape for value in lowered.graph.inputs}
    shapes |= {op.name: op.shape for op in lowered.graph.ops}
    first, *_ = own = [ops[name] for name in members]
    read = ", ".join("x".join(map(str, shapes[name])) for name in first.inputs[:2])
    return f"{' + '.join(op.kind for op in own)} of {read}"


def _page_s() -> float:
    """Measure the seconds of one page fault: the first write of fresh pages beside the second."""
    fresh, first_s = torch.empty(2**24), list[float]()
    faults = _faults(lambda: first_s.append(_seconds(lambda: fresh.fill_(1.0))))
    return max(0.0, first_s[0] - _seconds(lambda: fresh.fill_(2.0))) / max(faults, 1.0)


def _faults(run: Callable[[], object]) -> float:
    clock = FaultClock()
    begun = clock.now()
    run()
    return clock.seconds(begun, clock.now())


def _seconds(run: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    run()
    return time.thread_time() - begun_s

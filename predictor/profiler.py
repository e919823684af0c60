"""Measures what each node of the lowered graph takes on this device, inside running steps of the real model.

Every operator is timed at every precision in the company it will run in: one step per uniform precision, and a few with
mixed precisions so that casts between any two types occur. Rounds are interleaved and the median is kept, so that a drift
of the machine falls on all precisions alike.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from qsync.errors import CalibrationError
from qsync.graph import OpGraph
from qsync.lowering import Cast, LoweredGraph
from qsync.precision import PRECISIONS_BY_KIND, Precision
from qsync.predictor.clocks import Clock
from qsync.predictor.recorder import Recorder, StepTimes
from qsync.profiles import Cost, Profile

Choose = Callable[[OpGraph], Mapping[str, Precision]]


class Runner(Protocol):
    """A model that runs as told: see qsync.runtime.Program."""

    def choose(self, choose: Choose, observer: Any = None) -> None: ...

    @property
    def graph(self) -> OpGraph: ...

    @property
    def lowered(self) -> tuple[LoweredGraph, ...]: ...


def measure(
    runner: Runner,
    loss: Callable[[], torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
    precisions: Sequence[Precision],
    clock: Clock,
    *,
    device_class: str,
    machine: Mapping[str, Any],
    emulated_share: float | None = None,
    rounds: int = 3,
    make_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """A profile of this device class, from `rounds` steps at each of `precisions` and at mixtures of them.

    `loss` runs the model forward on the example batch and returns the scalar loss; this function runs backward. Raises
    CalibrationError when the loss is not a finite number.
    """
    recorder = Recorder(clock)
    samples: list[StepTimes] = []
    by_precision: dict[str, list[float]] = defaultdict(list)
    choices = _choices(precisions)
    graph: OpGraph | None = None
    for turn in range(rounds + 1):
        for label, choose in choices:
            progress(f"profile {label}, round {turn} of {rounds}" if turn else f"profile {label}, warm-up")
            runner.choose(choose, recorder)
            step = _timed_step(recorder, loss, parameters)
            if graph is None:
                graph = runner.graph
            if turn:
                samples.append(step)
                by_precision[label].append(step.total)
    assert graph is not None
    ops, casts = _medians(samples)
    optimizer_s, optimizer_bytes = _time_optimizer(parameters, make_optimizer, clock)
    forward, backward = _median(s.outside.forward_s for s in samples), _median(s.outside.backward_s for s in samples)
    return Profile(
        device_class=device_class,
        graph_hash=graph.hash,
        shapes_hash=graph.shapes_hash,
        ops=ops,
        casts=casts,
        cast_fit=_fit_casts(casts, graph),
        outside=Cost(forward, backward),
        host_s=_median(s.before for s in samples),
        optimizer_s=optimizer_s,
        optimizer_bytes=optimizer_bytes,
        step_s={label: statistics.median(times) for label, times in by_precision.items()},
        machine=dict(machine),
        emulated_share=emulated_share,
        bucket_s_per_byte=_time_bucket_copy(parameters, clock),
    )


def _choices(precisions: Sequence[Precision]) -> list[tuple[str, Choose]]:
    """Uniform assignments, and two mixtures in which neighbours differ."""

    def uniform(precision: Precision) -> Choose:
        return lambda graph: {op.name: precision for op in graph.adjustable if precision in PRECISIONS_BY_KIND[op.kind]}

    def mixture(seed: int) -> Choose:
        def choose(graph: OpGraph) -> dict[str, Precision]:
            draw = random.Random(seed)
            drawn = {op.name: draw.choice(list(precisions)) for op in graph.adjustable}
            return {op.name: drawn[op.name] for op in graph.adjustable if drawn[op.name] in PRECISIONS_BY_KIND[op.kind]}

        return choose

    choices: list[tuple[str, Choose]] = [(str(precision), uniform(precision)) for precision in precisions]
    if len(precisions) > 1:
        choices += [(f"mixture {seed}", mixture(seed)) for seed in (1, 2)]
    return choices


def _timed_step(
    recorder: Recorder, loss: Callable[[], torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> StepTimes:
    for parameter in parameters:
        parameter.grad = None
    recorder.start()
    value = loss()
    recorder.loss_ready()
    value.backward()  # type: ignore[no-untyped-call]
    step = recorder.finish()
    check_finite(value)
    return step


def check_finite(loss: torch.Tensor) -> None:
    """CalibrationError unless the loss is one finite number."""
    if loss.numel() != 1:
        raise CalibrationError(f"the loss has shape {tuple(loss.shape)}; return one number, for example its mean")
    if not math.isfinite(loss.item()):
        raise CalibrationError(f"the loss on the example batch is {loss.item()}; check the batch for NaN and Inf")


def _medians(
    samples: Sequence[StepTimes],
) -> tuple[dict[str, dict[str, Cost]], dict[tuple[str, str, str], Cost]]:
    """Median cost of each (operator, mode) and of each cast, over all steps that contained it."""
    runs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    casts: dict[tuple[str, str, str], list[Cost]] = defaultdict(list)
    for step in samples:
        for node, cost in step.nodes:
            if isinstance(node, Cast):
                casts[node.value, node.source, node.target].append(cost)
            else:
                runs[node.op, node.mode].append(cost)
    ops: dict[str, dict[str, Cost]] = defaultdict(dict)
    for (op, mode), costs in runs.items():
        ops[op][mode] = _median_cost(costs)
    return dict(ops), {key: _median_cost(costs) for key, costs in casts.items()}


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _median_cost(costs: Sequence[Cost]) -> Cost:
    return Cost(_median(cost.forward_s for cost in costs), _median(cost.backward_s for cost in costs))


def _fit_casts(
    casts: Mapping[tuple[str, str, str], Cost], graph: OpGraph
) -> dict[tuple[str, str], tuple[Cost, Cost]]:
    """For each pair of types, latency and seconds per element, forward and backward (least squares, not negative)."""
    sizes = {value.name: value.num_elements for value in (*graph.inputs, *graph.ops)}
    pairs: dict[tuple[str, str], list[tuple[int, Cost]]] = defaultdict(list)
    for (value, source, target), cost in casts.items():
        pairs[source, target].append((sizes[value], cost))
    fits = {}
    for pair, points in pairs.items():
        forward = _line([(n, cost.forward_s) for n, cost in points])
        backward = _line([(n, cost.backward_s) for n, cost in points])
        fits[pair] = (Cost(forward[0], backward[0]), Cost(forward[1], backward[1]))
    # A pair that no step contained costs what the nearest measured one does: the same target from another float.
    for source in ("fp32", "bf16"):
        for _, target in list(fits):
            known = [fits[s, t] for s, t in list(fits) if t == target]
            fits.setdefault((source, target), known[0])
    return fits


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope of a least-squares line, neither negative."""
    mean_n = statistics.fmean(n for n, _ in points)
    mean_s = statistics.fmean(s for _, s in points)
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    if not spread:
        return 0.0, mean_s / max(mean_n, 1.0)
    slope = max(sum((n - mean_n) * (s - mean_s) for n, s in points) / spread, 0.0)
    intercept = mean_s - slope * mean_n
    return (intercept, slope) if intercept >= 0 else (0.0, mean_s / max(mean_n, 1.0))


def _time_optimizer(
    parameters: Sequence[torch.nn.Parameter],
    make_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
    clock: Clock,
    limit: int = 64 * 2**20,
) -> tuple[float, int]:
    """Seconds of one optimizer step and bytes of its state, on stand-ins for at most `limit` parameters, scaled up."""
    total = sum(parameter.numel() for parameter in parameters)
    stand_ins: list[torch.nn.Parameter] = []
    for parameter in parameters:
        stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.ones_like(parameter)
        stand_ins.append(stand_in)
        if sum(p.numel() for p in stand_ins) >= limit:
            break
    if not stand_ins:
        return 0.0, 0
    scale = total / max(sum(p.numel() for p in stand_ins), 1)
    optimizer = make_optimizer(stand_ins)
    times = []
    for _ in range(4):
        start = clock.now()
        optimizer.step()
        end = clock.now()
        clock.settle()
        times.append(clock.seconds(start, end))
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    num_bytes = sum(v.numel() * v.element_size() for v in state)
    return statistics.median(times[1:]) * scale, int(num_bytes * scale)


def _time_bucket_copy(parameters: Sequence[torch.nn.Parameter], clock: Clock) -> float:
    """Seconds per byte that DDP takes to put a gradient, divided by the number of ranks, into its bucket."""
    if not parameters:
        return 0.0
    size = min(max(sum(p.numel() for p in parameters), 1), 4 * 2**20)
    gradient = torch.ones(size, device=parameters[0].device)
    bucket = torch.empty_like(gradient)
    times = []
    for _ in range(6):
        start = clock.now()
        torch.mul(gradient, 0.5, out=bucket)
        end = clock.now()
        clock.settle()
        times.append(clock.seconds(start, end))
    return statistics.median(times[1:]) / (4 * size)

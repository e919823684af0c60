"""Measures what each node of the lowered graph takes on this device, inside running steps of the real model.

Every operator is timed at every precision in the company it will run in: one step per uniform precision, and
more with mixed precisions, so that operators are seen beside neighbours of other types. Steps are whole, with
the optimizer's: it leaves caches as training finds them. Rounds are interleaved and the median is kept, so
that a drift of the machine falls on all precisions alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from qsync.errors import CalibrationError
from qsync.lowering.rules import TURNED, Cast, LoweredGraph
from qsync.predictor.profiling.clocks import Clock, ShareClock, WallClock
from qsync.predictor.profiling.loader_wait import Loading
from qsync.predictor.profiling.machine_drift import pace
from qsync.predictor.profiling.mixed_assignments import mixtures
from qsync.predictor.profiling.node_timer import Recorder, StepTimes, look_s
from qsync.records.graph import OpGraph
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.records.profiles import Cost, Profile
from qsync.records.save_less import ops_that_save_less

# The first step after another assignment takes a few tenths of a millisecond longer: much of one this short.
SHORT_STEP_S = 0.5
NUM_UNSEEN = 2
MOST_ROUNDS = 12
# So many mixtures show every kind of cast there is.
FEW_MIXTURES = 2
# A step known to this part of its time is known well enough: replay's own error is larger.
GOOD_ENOUGH = 0.005
# How many mixed steps are timed for each uniform one.
MIXTURES_PER_PRECISION = 2

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Choose = Callable[[OpGraph], Mapping[str, Precision]]


class Runner(Protocol):
    """A model that runs as told: see qsync.runtime.program.Program."""

    def choose(
        self, choose: Choose, observer: Any = None, saving_less: Callable[[OpGraph], Any] | None = None
    ) -> None: ...

    def refused(self, graph: OpGraph, precision: Precision) -> Mapping[str, str]: ...

    @property
    def graph(self) -> OpGraph: ...

    @property
    def lowered(self) -> tuple[LoweredGraph, ...]: ...


class Profiler:
    """Measures one device class on one model and batch, a round at a time.

    A round is one step at each of `precisions` and at mixtures of them (see qsync.predictor.profiling.mixed_assignments); with
    `save_less` each a second time, in which every operator that can saves less for backward. `loss` runs the
    model forward on the example batch and returns the scalar loss; backward and the optimizer are run here,
    and the weights put back after it. Before every step a batch is taken from `loader`, if there is one, and
    only timed. More rounds can be added at any time, for example between training steps, so that the profile
    sees the machine as training does. A round with fewer steps than one of `num_precisions` has begins again,
    so that ranks that step together take as many.

    >>> profiler = Profiler(program, loss, parameters, [Precision.FP32, Precision.BF16], clock)
    >>> for _ in range(3): profiler.round()
    >>> profile = profiler.profile("infer", machine={})
    """

    def __init__(
        self,
        runner: Runner,
        loss: Callable[[], torch.Tensor],
        parameters: Sequence[torch.nn.Parameter],
        precisions: Sequence[Precision],
        clock: Clock,
        make_optimizer: MakeOptimizer = torch.optim.AdamW,
        progress: Callable[[str], None] = lambda text: None,
        save_less: bool = False,
        loader: Iterable[Any] | None = None,
        num_precisions: int = 0,
    ) -> None:
        self._runner, self._loss, self._parameters = runner, loss, list(parameters)
        self._clock, self._progress = clock, progress
        self._loading = Loading(loader, _waiting(clock)) if loader is not None else None
        self._recorder = Recorder(clock, look_s(clock))
        self._precisions = tuple(precisions)
        choices = _choices(precisions, save_less, runner.refused)
        num = max(len(choices), _num_choices(num_precisions, save_less))
        self._choices = [choices[k % len(choices)] for k in range(num)]
        self._samples: list[tuple[str, StepTimes]] = []
        self._at_s: list[float] = []
        self._beyond: list[tuple[int, float]] = []
        self._beyond_s = 0.0  # of the last step: its wall time less its own
        self._optimizer_s: list[float] = []
        self._bucket: list[float] = []
        self._unseen: list[float] = []  # what a step takes if nobody looks, as a part of what it takes else
        self._began_s = time.perf_counter()
        self._num_steps = 0
        self._optimizer = make_optimizer(self._parameters)
        self._typical_s: list[float] = []
        self._weights = [parameter.detach().clone() for parameter in self._parameters]
        progress("profile, tracing")
        tracing = self._step(*self._choices[0][1:])
        self._put_weights_back()
        for k, (label, choose, less) in enumerate(self._choices):
            is_long = tracing.total - tracing.before > SHORT_STEP_S
            if is_long and (k == 0 or k >= len(self._precisions) + FEW_MIXTURES):
                # Long steps do not mind how they begin, and by now every kernel is compiled.
                self._typical_s.append(tracing.total - tracing.before)
                continue
            progress(f"profile {label}, warm-up")
            self._typical_s.append(self._step(choose, less).total)
            self._put_weights_back()
        self._optimizer_s.clear()
        self.graph = runner.graph
        self._made_s = time.perf_counter() - self._began_s

    @property
    def num_choices(self) -> int:
        """How many assignments a round times."""
        return len(self._choices)

    def round(self) -> None:
        """One more step at every precision. Raises CalibrationError when the loss is not a finite number."""
        for k in range(self.num_choices):
            self.measure(k)

    def measure(self, k: int) -> None:
        """One more step of the k-th assignment of a round.

        A short step is preceded by some that nobody looks at: the first warms caches, which other work left
        cold, the others say how much looking adds. (Looking keeps tensors alive a little longer, and the
        next ones land in colder memory: 1 to 3 % of a forward pass here.)
        """
        label, choose, less = self._choices[k]
        self._progress(f"profile {label}, round {len(self._samples) // self.num_choices + 1}")
        unseen_s = beyond_s = None
        if self._typical_s[k] < SHORT_STEP_S:
            self._unseen_step(choose, less)
            unseen = [(self._unseen_step(choose, less), self._beyond_s) for _ in range(NUM_UNSEEN)]
            unseen_s, beyond_s = (statistics.fmean(values) for values in zip(*unseen, strict=True))
        step = self._step(choose, less)
        self._samples.append((label, step))
        self._at_s.append(time.perf_counter())
        self._beyond.append((k, self._beyond_s if beyond_s is None else beyond_s))
        if unseen_s is not None:
            self._unseen.append(unseen_s / step.total)
        self._put_weights_back()
        if k == 0:
            self._bucket.append(_time_bucket_copy(self._parameters, self._clock))

    def assignment(self, k: int) -> dict[str, Precision]:
        """The k-th assignment of a round."""
        return dict(self._choices[k][1](self.graph))

    def saves_less(self, k: int) -> bool:
        """Whether operators save less in the k-th step of a round."""
        return self._choices[k][2]

    def typical_s(self) -> list[float]:
        """About how many seconds each step of a round takes; decides how it is timed."""
        return list(self._typical_s)

    def steps_with(self, typical_s: Sequence[float]) -> None:
        """Time each step as one that takes so long: ranks that step together must do it alike."""
        self._typical_s = list(typical_s)

    def beyond(self) -> list[tuple[int, float]]:
        """Of every step in `samples`, which of a round it was, and the seconds by which one like it took
        longer than this rank's own work: what it waited for, where the clock tells work from waiting.
        """
        return list(self._beyond)

    def samples(self) -> list[tuple[str, float, float]]:
        """Of every step that was looked at: its label, its seconds, and when it ended."""
        return [
            (label, step.total, at_s) for (label, step), at_s in zip(self._samples, self._at_s, strict=True)
        ]

    def profile(
        self,
        device_class: str,
        machine: Mapping[str, Any],
        emulated_share: float | None = None,
        slow: Sequence[float] | None = None,
    ) -> Profile:
        """The profile of all rounds so far: medians.

        `slow` says how slow the machine was at each of `samples`, where more is known of it than they tell.
        """
        steps = [step for _, step in self._samples]
        totals: dict[str, list[float]] = defaultdict(list)
        for label, step in self._samples:
            totals[label].append(step.total)
        slow = self.pace() if slow is None else slow
        unseen = statistics.median(self._unseen) if self._unseen else 1.0
        ops, casts = _medians(self._samples, slow, min(unseen, 1.0))
        return Profile(
            device_class=device_class,
            graph_hash=self.graph.hash,
            shapes_hash=self.graph.shapes_hash,
            ops=ops,
            casts=casts,
            cast_fit=_fit_casts(casts, self.graph),
            outside=_median_cost([step.outside for step in steps]),
            host_s=_median(step.before for step in steps),
            optimizer_s=_median(self._optimizer_s),
            optimizer_bytes=self._optimizer_bytes(),
            step_s={label: statistics.median(times) for label, times in totals.items()},
            machine=dict(machine),
            emulated_share=emulated_share,
            bucket_s_per_byte=_median(self._bucket),
            noise=self._noise(slow),
            drift=_robust_deviation(slow),
            error=_unseen_error(self._samples, slow),
            num_steps=self._num_steps,
            seconds=time.perf_counter() - self._began_s,
            refused=self._refused(),
            loading_s=self._loading.wait_s if self._loading else 0.0,
            model=self.graph.model,
            batch=self.graph.batch_shapes,
        )

    def fill(self, seconds: float) -> None:
        """As many steps as it takes to know one to half a per cent, and no longer than `seconds` in all.

        The time counts from the profiler's making. Every step of a round is taken once, and the first twice,
        in any case.
        """
        while self.wants_more(seconds):
            self.measure(len(self._samples) % self.num_choices)

    def wants_more(self, seconds: float) -> bool:
        """Whether `fill` would take another step."""
        done = len(self._samples)
        if done <= self.num_choices:
            return True
        rounds = done / self.num_choices
        known = done % self.num_choices == 0 and self._noise(self.pace()) / math.sqrt(rounds) < GOOD_ENOUGH
        passed_s = time.perf_counter() - self._began_s
        late = passed_s + (passed_s - self._made_s) / done > seconds
        return not known and not late and rounds < MOST_ROUNDS

    def pace(self) -> list[float]:
        """How slow the machine was at each sample: a factor."""
        return pace(*zip(*self.samples(), strict=True)) if self._samples else []

    def _noise(self, slow: Sequence[float]) -> float:
        """How much a step differs from its like once drift is taken out: a part of its time."""
        usual: dict[str, list[float]] = defaultdict(list)
        for (label, step), factor in zip(self._samples, slow, strict=True):
            usual[label].append(step.total / factor)
        # Each median was taken from the same steps, which makes them look closer to it than they are.
        around = []
        for times in usual.values():
            lost = math.sqrt(len(times) / (len(times) - 1)) if len(times) > 1 else 0.0
            middle = statistics.median(times)
            around += [lost * (time_s / middle - 1.0) for time_s in times] if lost else []
        return _robust_deviation(around) if around else 0.0

    def _refused(self) -> dict[str, dict[str, str]]:
        """What was left out because the device does not serve it: operator -> precision -> why."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for precision in self._precisions:
            for op, reason in self._runner.refused(self.graph, precision).items():
                found[op][str(precision)] = reason
        return dict(found)

    def _step(self, choose: Choose, less: bool) -> StepTimes:
        """A whole step; it changes the weights."""
        self._next_batch()
        self._runner.choose(choose, self._recorder, _everything if less else None)
        begun_s, begun = time.perf_counter(), self._clock.now()
        step = _timed_step(self._recorder, self._loss, self._parameters)
        start = self._clock.now()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = self._clock.now()
        self._clock.settle()
        self._beyond_s = time.perf_counter() - begun_s - self._clock.seconds(begun, end)
        self._optimizer_s.append(self._clock.seconds(start, end))
        return step

    def _unseen_step(self, choose: Choose, less: bool) -> float:
        """Seconds of a whole step without an observer, up to the optimizer's."""
        self._next_batch()
        self._runner.choose(choose, None, _everything if less else None)
        begun_s, start = time.perf_counter(), self._clock.now()
        self._loss().backward()  # type: ignore[no-untyped-call]
        end = self._clock.now()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        done = self._clock.now()
        self._clock.settle()
        self._beyond_s = time.perf_counter() - begun_s - self._clock.seconds(start, done)
        return self._clock.seconds(start, end)

    def _next_batch(self) -> None:
        self._num_steps += 1
        if self._loading is not None:
            self._loading.fetch()

    def _put_weights_back(self) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self._parameters, self._weights, strict=True):
                parameter.copy_(weight)

    def _optimizer_bytes(self) -> int:
        state = [v for entry in self._optimizer.state.values() for v in entry.values()]
        return sum(v.numel() * v.element_size() for v in state if isinstance(v, torch.Tensor))


def _waiting(clock: Clock) -> Clock:
    """The clock that waiting for a batch is timed with: a rank of a job waits in wall time, not its own."""
    return WallClock() if isinstance(clock, ShareClock) and clock.share == 1.0 else clock


def _everything(graph: OpGraph) -> tuple[str, ...]:
    return ops_that_save_less(graph, ["*"])


def _num_choices(num_precisions: int, save_less: bool = False) -> int:
    """Steps of a round: one of each precision, and of mixtures where there is more than one."""
    num = num_precisions * (1 + MIXTURES_PER_PRECISION) if num_precisions > 1 else num_precisions
    return 2 * num if save_less else num


def _choices(
    precisions: Sequence[Precision],
    save_less: bool,
    refused: Callable[[OpGraph, Precision], Mapping[str, str]],
) -> list[tuple[str, Choose, bool]]:
    """Uniform assignments, and more mixtures than these; whether operators save less.

    An operator runs in FP32 where its kind does not have its precision, or the device refuses it.
    """
    num = _num_choices(len(precisions)) - len(precisions)

    def served(graph: OpGraph, wanted: Mapping[str, Precision]) -> dict[str, Precision]:
        without = {precision: refused(graph, precision) for precision in set(wanted.values())}
        return {
            op.name: wanted[op.name]
            for op in graph.adjustable
            if op.name in wanted
            and wanted[op.name] in PRECISIONS_BY_KIND[op.kind]
            and op.name not in without[wanted[op.name]]
        }

    def uniform(precision: Precision) -> Choose:
        return lambda graph: served(graph, {op.name: precision for op in graph.adjustable})

    made: dict[str, list[dict[str, Precision]]] = {}

    def mixture(k: int) -> Choose:
        def choose(graph: OpGraph) -> Mapping[str, Precision]:
            if graph.shapes_hash not in made:
                made[graph.shapes_hash] = mixtures(graph, precisions, num)
            return served(graph, made[graph.shapes_hash][k])

        return choose

    choices: list[tuple[str, Choose]] = [(str(precision), uniform(precision)) for precision in precisions]
    choices += [(f"mixture {k + 1}", mixture(k)) for k in range(num)]
    plain = [(label, choose, False) for label, choose in choices]
    return plain + [(f"{label}, saving less", choose, True) for label, choose in choices if save_less]


def _timed_step(
    recorder: Recorder, loss: Callable[[], torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> StepTimes:
    for parameter in parameters:
        parameter.grad = None
    recorder.start()
    value = loss()
    recorder.loss_ready()
    check_scalar(value)
    value.backward()  # type: ignore[no-untyped-call]
    step = recorder.finish()
    check_finite(value)
    return step


def check_scalar(loss: torch.Tensor) -> None:
    """CalibrationError unless the loss is one number: looks at its shape only, so no device is waited for."""
    if loss.numel() != 1:
        raise CalibrationError(
            f"the loss has shape {tuple(loss.shape)}; return one number, for example its mean"
        )


def check_finite(loss: torch.Tensor) -> None:
    """CalibrationError unless the loss is finite."""
    if not math.isfinite(loss.item()):
        raise CalibrationError(
            f"the loss on the example batch is {loss.item()}; check the batch for NaN and Inf"
        )


def _medians(
    samples: Sequence[tuple[str, StepTimes]], slowness: Sequence[float], unseen: float = 1.0
) -> tuple[dict[str, dict[str, Cost]], dict[tuple[str, str, str], Cost]]:
    """Median cost of each (operator, mode) and of each cast, over all steps that contained it.

    Noise only ever adds, so medians of parts sum to less than the median of the whole: all are scaled by that
    one ratio, and by what a step takes if nobody looks (`unseen`, as a part of what it takes else).
    """
    runs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    casts: dict[tuple[str, str, str], list[Cost]] = defaultdict(list)
    for (_, step), slow in zip(samples, slowness, strict=True):
        for node, cost in step.nodes:
            cost = Cost(cost.forward_s / slow, cost.backward_s / slow)
            if isinstance(node, Cast):
                casts[node.value, node.taken_as, node.target].append(cost)
            else:
                runs[node.op, node.timed_as].append(cost)
    scale = unseen * _whole_over_parts(samples)
    ops: dict[str, dict[str, Cost]] = defaultdict(dict)
    for (op, mode), costs in runs.items():
        ops[op][mode] = _median_cost(costs, scale)
    return dict(ops), {key: _median_cost(costs, scale) for key, costs in casts.items()}


def _unseen_error(samples: Sequence[tuple[str, StepTimes]], slowness: Sequence[float]) -> float:
    """By how much steps of mixed precision are missed by costs taken from all other steps: root mean square.

    Leave one out: what the profile would have said of that mixture, had it not seen it.
    """
    misses = []
    for label in dict.fromkeys(label for label, _ in samples if label.startswith("mixture")):
        pairs = list(zip(samples, slowness, strict=True))
        others = [(sample, slow) for sample, slow in pairs if sample[0] != label]
        own = [(step, slow) for (name, step), slow in pairs if name == label]
        ops, casts = _medians([sample for sample, _ in others], [slow for _, slow in others])
        predicted = measured = 0.0
        for j, (node, _) in enumerate(own[0][0].nodes):
            found = (
                casts.get((node.value, node.taken_as, node.target))
                if isinstance(node, Cast)
                else ops.get(node.op, {}).get(node.timed_as)
            )
            if found is not None:  # seen nowhere else: there is nothing to compare
                predicted += found.total_s
                measured += _median(step.nodes[j][1].total_s / slow for step, slow in own)
        if predicted:
            misses.append(measured / predicted - 1.0)
    return math.sqrt(statistics.fmean(miss**2 for miss in misses)) if misses else 0.0


def _robust_deviation(values: Sequence[float]) -> float:
    """Standard deviation by the median distance from the median, times 1.4826, as of a normal law."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def _whole_over_parts(samples: Sequence[tuple[str, StepTimes]]) -> float:
    """Median time of a step's nodes together, over the sum of their medians; over all labels."""
    whole = parts = 0.0
    by_label: dict[str, list[StepTimes]] = defaultdict(list)
    for label, step in samples:
        by_label[label].append(step)
    for steps in by_label.values():
        whole += _median(sum(cost.total_s for _, cost in step.nodes) for step in steps)
        parts += sum(
            _median_cost([cost for _, cost in same]).total_s
            for same in zip(*(s.nodes for s in steps), strict=True)
        )
    return whole / parts if parts else 1.0


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _median_cost(costs: Sequence[Cost], scale: float = 1.0) -> Cost:
    return Cost(
        scale * _median(cost.forward_s for cost in costs),
        scale * _median(cost.backward_s for cost in costs),
        scale * _robust_deviation([cost.total_s for cost in costs]),
    )


def _fit_casts(
    casts: Mapping[tuple[str, str, str], Cost], graph: OpGraph
) -> dict[tuple[str, str], tuple[Cost, Cost]]:
    """For each pair of types, latency and seconds per element, forward and backward (least squares, not
    negative).
    """
    sizes = {value.name: value.num_elements for value in graph.inputs}
    sizes |= {op.name: op.num_elements for op in graph.ops}
    pairs: dict[tuple[str, str], list[tuple[int, Cost]]] = defaultdict(list)
    for (value, source, target), cost in casts.items():
        pairs[source.removesuffix(TURNED), target].append((sizes[value], cost))
    fits = {}
    for pair, points in pairs.items():
        forward = _line([(n, cost.forward_s) for n, cost in points])
        backward = _line([(n, cost.backward_s) for n, cost in points])
        fits[pair] = (Cost(forward[0], backward[0]), Cost(forward[1], backward[1]))
    # A pair that no step contained costs what the nearest measured one does: the same target from another
    # float.
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

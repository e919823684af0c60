"""Profiler: the time of every node of the lowered graph, inside running steps of the real model.

Every operator is timed in every precision beside realistic neighbours: one step per uniform precision, and
further steps in mixed precisions (`mixed_assignments`). Steps are whole and include the optimizer, which
leaves caches in the state that training finds. The steps of a round are interleaved and medians are taken, so
that drift of the machine affects all precisions equally.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qsync.errors import CalibrationError, UnsupportedError, shortened
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import Precision
from qsync.predictor.profiling.clocks import Clock, CudaClock, KernelClock, LaunchClock, ShareClock, WallClock
from qsync.predictor.profiling.launches import Launches
from qsync.predictor.profiling.loader_wait import TimedLoader
from qsync.predictor.profiling.machine_drift import drift_factors, label_error, walk_rate
from qsync.predictor.profiling.made_optimizer import MakeOptimizer, made, state_by_parameter, state_bytes
from qsync.predictor.profiling.memory_trace import measure_residuals, optimizer_workspace
from qsync.predictor.profiling.mixed_assignments import RoundStep, num_round_steps, round_steps
from qsync.predictor.profiling.node_timer import NodeTimer, StepTimes, timing_hook_s
from qsync.predictor.profiling.runner import Choose, Runner, check_finite, check_scalar
from qsync.predictor.profiling.step_statistics import (
    fit_casts,
    leave_one_out_error,
    median,
    median_cost,
    node_costs,
    noise,
    timer_seconds,
)
from qsync.records.memory_residuals import MemoryResiduals
from qsync.records.profiles import Profile
from qsync.records.save_less import ops_that_save_less

# The timer adds a few milliseconds to a step. A timed step below this gets a twin step without the timer.
LONG_STEP_S = 1.0
# The first step after a change of assignment takes a few tenths of a millisecond longer than the next. A
# timed step below this gets a warm-up step and two twins without the timer. Longer steps are expensive, so
# their mixtures get no twins: the twins of uniform precisions show the timer's cost.
SHORT_STEP_S = 0.1
MAX_ROUNDS = 12
# Mixtures to warm up if steps are not short: two contain every kind of cast.
NUM_WARMED_MIXTURES = 2
# Profiling stops once the relative standard error of a step's time against others' is below this.
GOOD_ENOUGH = 0.005


class Wait(NamedTuple):
    """The seconds of a step beyond the rank's own work, and those after its last gradient.

    `exposed_s` is a part of `wait_s`; overlapping all-reduces took the rest from compute, in wall seconds.
    """

    wait_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class ProfilerOptions:
    """The options of a profiler's steps.

    With `save_less`, a round repeats each step with all able operators saving less for backward. Before every
    step a batch is fetched from `loader`; the fetch is timed, and the batch is not used. `num_precisions` is
    the largest number of precisions on any rank. A rank with fewer precisions repeats the first steps of its
    round, so that all ranks' rounds have equally many steps. After `until_s` (of `time.perf_counter`), memory
    is not measured, and no mixture is warmed up.
    """

    make_optimizer: MakeOptimizer = torch.optim.AdamW
    progress: Callable[[str], None] = lambda text: None
    save_less: bool = False
    loader: Iterable[Any] | None = None
    num_precisions: int = 0
    until_s: float = math.inf


class Profiler:
    """The measurements of one device class on one model and batch, round by round.

    A round is one step in each of `precisions` and in mixtures of them. `loss` runs the model forward on the
    example batch and returns the scalar loss. The profiler runs backward and the optimizer, then restores the
    weights. More rounds can be added at any time, for example between training steps, to measure the machine
    under training's conditions. A profiler of another batch may follow a `first` one of the same parameters.

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
        options: ProfilerOptions | None = None,
        first: Profiler | None = None,
    ) -> None:
        options = options or ProfilerOptions()
        self._runner, self._loss, self._parameters = runner, loss, list(parameters)
        self._progress, self._until_s = options.progress, options.until_s
        self._loader = (
            TimedLoader(options.loader, _waiting_clock(clock)) if options.loader is not None else None
        )
        # On a GPU, one step times kernels and another step times their launches.
        self._launches = Launches(LaunchClock()) if isinstance(clock, CudaClock) else None
        self._clock = clock = KernelClock() if self._launches else clock
        self._timer = NodeTimer(clock, timing_hook_s(clock))
        self._precisions = tuple(precisions)
        steps = round_steps(precisions, options.save_less, runner.unsupported)
        num = max(len(steps), num_round_steps(options.num_precisions, options.save_less))
        self._round = [steps[k % len(steps)] for k in range(num)]
        self._twinned = [self.is_uniform(k) for k in range(num)]
        self._samples: list[tuple[str, StepTimes]] = []
        self._ended_at_s: list[float] = []
        self._waits: list[tuple[int, Wait]] = []
        self._wait = Wait(0.0, 0.0)  # wait of the last step
        self._reduced_s = 0.0  # end of the last step's backward, all-reduces included (perf_counter)
        self._arriving_last: list[torch.Tensor] = []  # the parameter with the last gradient, once known
        self._optimizer_s: list[float] = []
        self._bucket_s_per_byte: list[float] = []
        self._held_down: list[str] = []  # by round: reason for a reduced clock
        self._plain_s: list[float | None] = []  # by sample: seconds of its twins without the timer
        self._began_s = time.perf_counter()
        self._num_steps = 0
        self._ran: dict[str, set[str]] = {}  # label -> operators of its first timed step
        self.unused: set[int] = set()  # ids of parameters without a gradient in some step
        # Profilers of the same model in turns share what takes as much memory as the model.
        self._optimizer: Any
        self._weights: list[torch.Tensor]
        if first is not None:
            self._optimizer, self._weights = first._optimizer, first._weights
        else:
            self._optimizer = made(options.make_optimizer, self._parameters)
            self._weights = [parameter.detach().clone() for parameter in self._parameters]
        self._workspace_bytes: list[int] = []  # of one optimizer step, once its state is there
        self._typical_s = self._warm_up()
        self._memory_residuals = self._measure_memory()
        self._optimizer_s.clear()
        self.graph = runner.graph
        self._measuring_s = 0.0  # of all `measure` so far

    def _warm_up(self) -> list[float]:
        """Trace the model, compile all kernels, and return approximate seconds of a round's steps."""
        self._progress("profile, tracing")
        tracing = self._timed_step(self._round[0])
        self._ran.clear()  # a model may change itself in its first call
        self._put_weights_back()
        long_s = tracing.total_s - tracing.host_s
        typical_s: list[float] = []
        for k, step in enumerate(self._round):
            # A cold start is negligible in a long step, and tracing has compiled all kernels.
            if k == 0 and long_s > LONG_STEP_S:
                typical_s.append(long_s)
                continue
            is_late = k >= len(self._precisions) and time.perf_counter() > self._until_s
            if is_late or (long_s > SHORT_STEP_S and k >= len(self._precisions) + NUM_WARMED_MIXTURES):
                typical_s.append(statistics.fmean(typical_s[: len(self._precisions)]))
                continue
            self._progress(f"profile {step.label}, warm-up")
            typical_s.append(self._timed_step(step, not self._workspace_bytes).total_s)
            self._put_weights_back()
        return typical_s

    def _measure_memory(self) -> MemoryResiduals:
        """Return the residuals of memory against the prediction, from one step per uniform precision."""
        if time.perf_counter() > self._until_s:
            return MemoryResiduals()

        def assignments() -> Iterator[Choose]:
            for step in self._round[: len(self._precisions)]:
                self._progress(f"profile {step.label}, memory")
                yield step.choose

        with _without_collection():
            return measure_residuals(self._runner, assignments(), self._loss, self._parameters)

    @property
    def num_choices(self) -> int:
        """Return the number of steps of a round."""
        return len(self._round)

    def round(self) -> None:
        """Measure one more step of every assignment; raise CalibrationError for a non-finite loss."""
        for k in range(self.num_choices):
            self.measure(k)

    def measure(self, k: int) -> None:
        """Measure one more step of the k-th assignment of a round.

        Steps below LONG_STEP_S get twins without the timer, which show how much time the timer adds. From
        SHORT_STEP_S on, only uniform precisions get twins.
        The first step of an assignment takes a per cent more than the next, so every other round takes the
        timed step first. One more step before short steps warms the caches. Python collects garbage only
        between measurements, since one collection takes as long as several steps.
        """
        begun_s = time.perf_counter()
        choice, number = self._round[k], len(self._samples) // self.num_choices
        self._progress(f"profile {choice.label}, round {number + 1}{self._left()}")
        num_twins = self._num_twins(k)
        plain_s = wait = None
        with _without_collection():
            if self._launches:
                self._launch_step(choice)
                self._free_step(choice)
            elif num_twins > 1:
                self._plain_step(choice)
            step = self._timed_step(choice) if number % 2 else None
            if num_twins and not self._launches:
                plain = [(self._plain_step(choice), *self._wait) for _ in range(num_twins)]
                plain_s, *waited = (statistics.fmean(values) for values in zip(*plain, strict=True))
                wait = Wait(*waited)
            step = step or self._timed_step(choice)
        self._samples.append((choice.label, step))
        self._ended_at_s.append(time.perf_counter())
        self._waits.append((k, wait or self._wait))
        self._plain_s.append(plain_s)
        self._put_weights_back()
        if k == 0:
            self._held_down.append(self._clock.held_down())
            self._bucket_s_per_byte.append(_time_bucket_copy(self._parameters, self._clock))
        self._measuring_s += time.perf_counter() - begun_s

    def _num_twins(self, k: int) -> int:
        """Return the number of twins without the timer of a round's k-th step."""
        if self._typical_s[k] < SHORT_STEP_S:
            return 2
        return int(self._typical_s[k] < LONG_STEP_S and self._twinned[k])

    def _left(self) -> str:
        """Return the remaining seconds of the required steps, in words; empty after these steps."""
        ahead = [*range(self.num_choices), 0][len(self._samples) :]
        left_s = sum(self._typical_s[k] * (1 + self._num_twins(k)) for k in ahead)
        return f", about {left_s:.0f} s left" if ahead else ""

    def shorten_round(self, num: int) -> None:
        """Limit every round to its first `num` steps; call it before the first `measure`."""
        self._round, self._typical_s = self._round[:num], self._typical_s[:num]
        self._twinned = self._twinned[:num]

    def assignment(self, k: int) -> dict[str, Precision]:
        """Return the k-th assignment of a round."""
        return dict(self._round[k].choose(self.graph))

    def saves_less(self, k: int) -> bool:
        """Return whether operators save less for backward in the k-th step of a round."""
        return self._round[k].saves_less

    def typical_s(self) -> list[float]:
        """Return the approximate seconds of each step of a round, which decide its number of twins."""
        return list(self._typical_s)

    def is_uniform(self, k: int) -> bool:
        """Return whether the k-th step of a round uses one precision wherever possible."""
        return k < len(self._precisions)

    def set_typical_s(self, typical_s: Sequence[float], twinned: Sequence[bool]) -> None:
        """Set each step's approximate seconds, and whether it gets twins without the timer.

        Ranks that step together must set equal values for their common steps.
        """
        self._typical_s, self._twinned = list(typical_s), list(twinned)

    def waits(self) -> list[tuple[int, Wait]]:
        """Return (step number in the round, wait) of every sample.

        A wait is zero if the clock counts waiting as work.
        """
        return list(self._waits)

    def samples(self) -> list[tuple[str, float, float]]:
        """Return (label, seconds, end time) of every timed step."""
        return [
            (label, step.total_s, at_s)
            for (label, step), at_s in zip(self._samples, self._ended_at_s, strict=True)
        ]

    def profile(
        self,
        device_class: str,
        machine: Mapping[str, Any],
        emulated_share: float | None = None,
        drift: Sequence[float] | None = None,
    ) -> Profile:
        """Return the profile of all rounds so far, whose costs are medians.

        `drift` has the slowness factor of the machine at each of `samples`. By default the factors are
        estimated from these samples alone.
        """
        steps = [step for _, step in self._samples]
        totals: dict[str, list[float]] = defaultdict(list)
        for label, step in self._samples:
            totals[label].append(step.total_s)
        if self._launches:  # seconds of steps without a timer
            totals |= self._launches.whole_s(median(self._optimizer_s))
        drift = self.drift_factors() if drift is None else drift
        seconds = time.perf_counter() - self._began_s
        # With a full queue, a GPU event costs as much as a hook. No untimed step has a full queue to compare.
        timer_s = self._timer.hook_s if self._launches else timer_seconds(steps, self._plain_s)
        found = node_costs(self._samples, drift, timer_s)
        return Profile(
            device_class=device_class,
            graph_hash=self.graph.hash,
            shapes_hash=self.graph.shapes_hash,
            ops=found.ops,
            casts=found.casts,
            cast_fit=fit_casts(found.casts, self.graph),
            switch_s=found.switch_s,
            outside=median_cost([step.outside for step in steps]),
            host_s=median(step.host_s for step in steps),
            optimizer_s=median(self._optimizer_s),
            optimizer_bytes=state_bytes(self._optimizer, self._parameters),
            step_s={label: statistics.median(times) for label, times in totals.items()},
            machine=dict(machine),
            emulated_share=emulated_share,
            bucket_s_per_byte=median(self._bucket_s_per_byte),
            noise=noise(self._samples, drift),
            drift=math.sqrt(walk_rate(*self._sampled()) * seconds / 6.0),  # see Profile.ahead
            error=leave_one_out_error(self._samples, drift),
            num_steps=self._num_steps,
            seconds=seconds,
            refused=self._unsupported(),
            loading_s=self._loader.wait_s if self._loader else 0.0,
            model=self.graph.model,
            batch=self.graph.batch_shapes,
            held_down=tuple(dict.fromkeys(filter(None, self._held_down))),
            launches=self._launches.profile(device_class, self.graph) if self._launches else None,
            memory_residuals=self._memory_residuals,
            bitwise=self._runner.kernels.bitwise,
            optimizer_workspace_bytes=max(self._workspace_bytes, default=0),
            state_bytes=state_by_parameter(self._optimizer, self._runner.model),
        )

    def fill(self, seconds: float) -> None:
        """Measure steps until their times are known to half a per cent, or `seconds` have passed.

        `seconds` count from the construction of the profiler. At least, the first step of a round is measured
        twice and every other step once.
        """
        while self.wants_more(self._began_s + seconds):
            self.measure(len(self._samples) % self.num_choices)

    def wants_more(self, until_s: float) -> bool:
        """Return whether `fill` would measure another step before `until_s` (of `time.perf_counter`)."""
        done = len(self._samples)
        if done <= self.num_choices:
            return True
        rounds = done / self.num_choices
        is_known = done % self.num_choices == 0 and label_error(*self._sampled()) < GOOD_ENOUGH
        is_late = time.perf_counter() + self._measuring_s / done > until_s
        return not is_known and not is_late and rounds < MAX_ROUNDS

    def drift_factors(self) -> list[float]:
        """Return the slowness factor of the machine at each sample."""
        return drift_factors(*self._sampled()) if self._samples else []

    def _sampled(self) -> tuple[Sequence[str], Sequence[float], Sequence[float]]:
        """Return the labels, seconds and end times of all timed steps."""
        labels, seconds, at_s = zip(*self.samples(), strict=True)
        return labels, seconds, at_s

    def _unsupported(self) -> dict[str, dict[str, str]]:
        """Return the precisions that the device does not support: operator -> precision -> reason."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for precision in self._precisions:
            for op, reason in self._runner.unsupported(self.graph, precision).items():
                found[op][str(precision)] = reason
        return dict(found)

    def _timed_step(self, choice: RoundStep, weighs_optimizer: bool = False) -> StepTimes:
        """Run a whole step with timing hooks, which changes the weights.

        `weighs_optimizer`: measure the memory of the optimizer's step, too, which makes it longer.
        """
        self._next_batch()
        self._choose(choice, self._timer)
        with self._waiting():
            step = self._forward_and_backward(self._timer)
            self._check_operators(choice, step)
            device = self._parameters[0].device
            with optimizer_workspace(device) if weighs_optimizer else nullcontext(list[int]()) as found:
                start = self._clock.now()
                self._optimizer_step()
                end = self._clock.now()
            self._workspace_bytes += found
            self._clock.settle()
        self._optimizer_s.append(self._clock.seconds(start, end))
        return step

    def _launch_step(self, choice: RoundStep) -> None:
        """Run a whole step in which the host waits for the GPU at every node, to time launches."""
        assert self._launches
        timer, clock = self._launches.timer, self._launches.timer.clock
        self._next_batch()
        self._choose(choice, timer)
        step = self._forward_and_backward(timer)
        start = clock.now()
        self._optimizer_step()
        self._launches.optimizer_s.append(clock.seconds(start, clock.now()))
        self._launches.samples.append((choice.label, step))

    def _free_step(self, choice: RoundStep) -> None:
        """Run a whole untimed step as in training; record its launch seconds and its wall seconds."""
        assert self._launches
        self._next_batch()
        self._choose(choice, None)
        self._clock.settle()
        begun_s = time.perf_counter()
        self._loss().backward()  # type: ignore[no-untyped-call]
        self._optimizer_step()
        launched_s = time.perf_counter() - begun_s
        self._clock.settle()
        self._launches.free[choice.label].append((launched_s, time.perf_counter() - begun_s))

    def _forward_and_backward(self, timer: NodeTimer) -> StepTimes:
        """Run forward and backward under a timer; raise CalibrationError for a non-finite loss."""
        for parameter in self._parameters:
            parameter.grad = None
        timer.start()
        value = self._loss()
        timer.loss_ready()
        check_scalar(value)
        value.backward()  # type: ignore[no-untyped-call]
        self._reduced_s = time.perf_counter()
        step = timer.finish()
        check_finite(value)
        self.unused |= {id(parameter) for parameter in self._parameters if parameter.grad is None}
        return step

    def _check_operators(self, choice: RoundStep, step: StepTimes) -> None:
        """Raise UnsupportedError if a step runs other operators than the first step with its label."""
        ran = {node.op for node, _ in step.nodes if isinstance(node, Run)}
        if others := ran ^ self._ran.setdefault(choice.label, ran):
            one = min(others, key=lambda op: ("." not in op, op))  # prefers names inside modules
            raise UnsupportedError(
                f"{self._runner.graph.model} runs {shortened(one)} in one step and not in another, and a "
                "plan is for the same operators in all: switch off what skips layers at random (the "
                "layerdrop of a Hugging Face config); where data chooses, give a batch that reaches all, and "
                "where the model draws (teacher forcing), let loss_fn draw nothing"
            )

    def _plain_step(self, choice: RoundStep) -> float:
        """Run a whole step without timing hooks; return its seconds without the optimizer."""
        self._next_batch()
        self._choose(choice, None)
        with self._waiting():
            start = self._clock.now()
            self._loss().backward()  # type: ignore[no-untyped-call]
            end, self._reduced_s = self._clock.now(), time.perf_counter()
            self._optimizer_step()
            self._clock.settle()
        return self._clock.seconds(start, end)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Record the wait of the step within the context, if the clock does not count waiting."""
        if not isinstance(self._clock, ShareClock):
            yield
            return
        watched, last = self._arriving_last or self._parameters, _Last()
        hooks = [p.register_post_accumulate_grad_hook(last.arrived) for p in watched]  # type: ignore[no-untyped-call]
        begun_s, begun = time.perf_counter(), self._clock.now()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        wait_s = time.perf_counter() - begun_s - self._clock.seconds(begun, self._clock.now())
        self._arriving_last = [last.parameter] if last.parameter is not None else []
        self._wait = Wait(wait_s, self._reduced_s - last.at_s if self._arriving_last else 0.0)

    def _choose(self, choice: RoundStep, observer: NodeTimer | None) -> None:
        saving = (lambda graph: ops_that_save_less(graph, ["*"])) if choice.saves_less else None
        self._runner.choose(choice.choose, observer, saving)

    def _optimizer_step(self) -> None:
        """Run an optimizer step; raise CalibrationError if it fails (closure, sparse gradients)."""
        try:
            self._optimizer.step()
        except Exception as error:
            raise CalibrationError(
                f"a step of make_optimizer's {type(self._optimizer).__name__} failed "
                f"({shortened(error, 200, quote=False)}); give another for the profile, for example "
                "make_optimizer=functools.partial(torch.optim.SGD, lr=0.1)"
            ) from error
        self._optimizer.zero_grad()

    def _next_batch(self) -> None:
        self._num_steps += 1
        if self._loader is not None:
            self._loader.fetch()

    def _put_weights_back(self) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self._parameters, self._weights, strict=True):
                parameter.copy_(weight)


class _Last:
    """A record of the last accumulated gradient: its parameter and time."""

    parameter: torch.Tensor | None = None
    at_s = 0.0

    def arrived(self, parameter: torch.Tensor) -> None:
        """Record a gradient; the hook of a parameter."""
        self.parameter, self.at_s = parameter, time.perf_counter()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable Python's garbage collection within the context."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _waiting_clock(clock: Clock) -> Clock:
    """Return the clock for loader waits: wall time if the clock counts CPU time of a whole core."""
    return WallClock() if isinstance(clock, ShareClock) and clock.share == 1.0 else clock


def _time_bucket_copy(parameters: Sequence[torch.nn.Parameter], clock: Clock) -> float:
    """Measure the seconds per byte of DDP's copy of a gradient to its bucket, with its division."""
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

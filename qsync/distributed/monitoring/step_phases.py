"""Time the phases of a rank's steps in an unchanged training loop, by hooks.

`qsync.replayer.explanation.phases` defines the phases. A pass begins with the first forward after a backward,
and ends with the next backward: a step of gradient accumulation has several. A timing hook costs about a
microsecond; a step has some twenty of them, however many parameters it trains.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from qsync.distributed.monitoring.gradient_hooks import GradientHooks
from qsync.distributed.monitoring.loader_batches import ignore, listen
from qsync.distributed.monitoring.positions import AFTER_BACKWARD, BACKWARD, Position
from qsync.distributed.monitoring.step_peak import StepPeak
from qsync.predictor.profiling.clocks import Clock, CudaClock, WallClock
from qsync.replayer.explanation.phases import Phases
from qsync.tracing.replaced_forward import NoHook, untraced

logger = logging.getLogger("qsync")

NUM_KEPT_STEPS = 256
_MOST_PASSES = 4096  # passes per step; more mean that no optimizer ends the step


class PhaseTimer:
    """Times all further steps of `model`, in any training loop; `steps` holds the last of them.

    The loop calls `model` (the model, or DDP around it); `trained` is the module whose parameters get
    gradients. Evaluation between two steps counts as host time. The first step is not counted. Waiting for a
    batch counts as host time, unless it comes from a DataLoader or inside `with timer.fetching()`. `log` and
    then `when_full`, if set, are called after every `num_kept` steps, which are then dropped. `when_resumed`,
    if set, is called at the end of every step that is not counted. `peak`, if set, measures their memory.

    Per step, `num_calls` holds the model's calls with gradients, and `numbers` the optimizer step's number.
    `others` names other training in these steps: another timed model, or an optimizer of other parameters.

    >>> timer = PhaseTimer(ddp, ddp.module)
    >>> ...                                   # train
    >>> median(timer.steps).blocked_s    # of qsync.replayer.explanation.phases
    """

    _running: ClassVar[weakref.WeakSet[PhaseTimer]] = weakref.WeakSet()

    def __init__(
        self, model: torch.nn.Module, trained: torch.nn.Module, num_kept: int = NUM_KEPT_STEPS
    ) -> None:
        self.steps: deque[Phases] = deque(maxlen=num_kept)
        self.num_calls: deque[int] = deque(maxlen=num_kept)
        self.numbers: deque[int] = deque(maxlen=num_kept)
        self.num_kept = num_kept  # may be lowered for a while
        self.others: set[str] = set()
        self.log: Callable[[], None] | None = None
        self.when_full: Callable[[], None] | None = None
        self.when_resumed: Callable[[], None] | None = None
        self.peak: StepPeak | None = None
        parameters = [p for p in trained.parameters() if p.requires_grad]
        cuda = bool(parameters) and parameters[0].device.type == "cuda"
        self._name = type(trained).__name__
        self._clock: Clock = CudaClock() if cuda else WallClock()
        self._marks: list[_Marks] = []
        self._ended: Any = None
        self._stepping: Any = None
        # CPU seconds of this thread, which runs the optimizer if there is no GPU.
        self._cpu_s: Callable[[], float] = float if cuda else time.thread_time
        self._stepping_cpu_s = 0.0
        self._num_steps = 0
        self._reset()
        self._fetching = self._said = False
        self._thread = threading.get_ident()
        self._own = {id(p) for p in parameters}
        self._when_ended = _weakly(self._backward_ended)
        self._gradients = GradientHooks(parameters, _weakly(self._gradient))
        self._hooks = [
            CallHook(model, _weakly(self._forward)),
            *([] if trained is model else [CallHook(trained, _weakly(self._forward_inside))]),
            CallHook(trained, _weakly(self._returned_from_forward), after=True),
            self._gradients,
            *self._optimizer_hooks(),
        ]
        self._running.add(self)
        listen(self)

    def _reset(self) -> None:
        """Discard the current step."""
        self._passes: list[_Pass] = []
        self._begun: Any = None  # start of the current pass
        self._inside: Any = None
        self._returned: Any = None
        self._last_gradient: Any = None
        self._in_backward = False
        self._num_calls = self._num_gradients = 0
        self._fetches: list[tuple[Any, Any]] = []

    def _optimizer_hooks(self) -> Iterator[Any]:
        """Time the steps of all optimizers of the process until the timer is freed."""
        begins = register_optimizer_step_pre_hook(_weakly(self._step_begins))
        ended = register_optimizer_step_post_hook(_weakly(self._step_ended))
        for hook in (begins, ended):
            weakref.finalize(self, hook.remove)
            yield hook

    def position(self) -> Position:
        """Return the loop's position; any thread may call this."""
        phase = BACKWARD if self._in_backward else int(self._begun is not None)
        if phase == 0 and self._passes:
            phase = AFTER_BACKWARD
        return Position(self._num_steps, phase, self._num_gradients, self._fetching)

    def stop(self) -> None:
        """Stop timing, and remove all hooks."""
        ignore(self)
        self._running.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def settle(self) -> None:
        """Compute `steps` from the recorded events. On a GPU this synchronizes once."""
        self._clock.settle()
        between = self._clock.seconds
        for step in self._marks:
            loading_s = sum(between(start, end) for start, end in step.fetches)
            forward_s = sum(between(one.inside, one.returned) for one in step.passes)
            compute_s = sum(between(one.inside, one.gradient) for one in step.passes)
            blocked_s = sum(
                between(one.begun, one.inside) + between(one.gradient, one.reduced) for one in step.passes
            )
            optimizer_s = between(step.stepping, step.end)
            host_s = between(step.ended, step.end) - loading_s - compute_s - blocked_s - optimizer_s
            self.steps.append(
                Phases(host_s, compute_s, blocked_s, optimizer_s, loading_s, forward_s, step.optimizer_cpu_s)
            )
            self.num_calls.append(step.num_calls)
            self.numbers.append(step.number)
        self._marks.clear()

    def restart(self) -> None:
        """Discard the current step, because its time is not only the loop's."""
        self._ended = None
        self._reset()

    def clear(self) -> None:
        """Discard all steps so far."""
        self.steps.clear()
        self.num_calls.clear()
        self.numbers.clear()
        self.others.clear()

    def after(self, num_steps: int, then: Callable[[], None]) -> None:
        """Call `then` at the end of a later step, now for 0 steps; steps until then are not counted."""

        def ended() -> None:
            nonlocal num_steps
            num_steps -= 1
            if num_steps == 0:
                self.when_resumed = None
                then()

        if num_steps:
            self.when_resumed = ended
        else:
            then()

    @contextmanager
    def fetching(self, batches: Any = None) -> Iterator[None]:
        """Count the time inside as waiting for the next batch.

        Only the loop's own thread counts, since prefetching threads delay nobody. If one loader reads from
        another, the time counts once.
        """
        waits = self._ended is not None and self._begun is None and not self._fetching
        if not waits or threading.get_ident() != self._thread:
            yield
            return
        self._fetching, start = True, self._clock.now()
        try:
            yield
        finally:
            self._fetching = False
            self._fetches.append((start, self._clock.now()))

    def _forward(self) -> None:
        if len(self._running) > 1:
            for timer in self._running:
                if timer is not self and timer._own.isdisjoint(self._own):
                    timer.others.add(self._name)
        if torch.is_grad_enabled():
            self._num_calls += 1
            if self._begun is None:
                self._begun = self._inside = self._returned = self._clock.now()

    def _forward_inside(self) -> None:
        if self._begun is not None and self._inside is self._begun and torch.is_grad_enabled():
            self._inside = self._clock.now()

    def _returned_from_forward(self) -> None:
        if self._begun is not None and not self._in_backward and torch.is_grad_enabled():
            self._returned = self._clock.now()

    def _gradient(self) -> None:
        self._last_gradient = self._clock.now()
        self._num_gradients += 1
        if self._in_backward:
            return
        self._in_backward = True
        if self._begun is None:  # a second backward after one forward
            self._begun = self._passes[-1].reduced if self._passes else self._last_gradient
            self._inside = self._returned = self._begun
        # DDP queues its wait for all-reduces during backward: a callback queued after backward runs later.
        _queue(lambda: _queue(self._when_ended))

    def _backward_ended(self) -> None:
        if self._begun is None:
            return
        now = self._clock.now()
        self._gradients.backward_ended()
        if len(self._passes) >= _MOST_PASSES:
            self._give_up_step()
            return
        self._passes.append(_Pass(self._begun, self._inside, self._returned, self._last_gradient, now))
        self._begun, self._in_backward = None, False
        if self._stepping is not None:  # the optimizer's step called a closure
            self._stepping, self._stepping_cpu_s = now, self._cpu_s()

    def _give_up_step(self) -> None:
        """Discard a step with too many passes: no optimizer of torch.optim ends it."""
        if not self._said:
            logger.warning(
                "qsync: %d backward passes of %s without a step of a torch.optim.Optimizer; its steps are "
                "neither timed nor compared with the prediction", _MOST_PASSES, self._name,
            )  # fmt: skip
        self._said, self._ended, self._stepping = True, None, None
        self._reset()

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            self._stepping, self._stepping_cpu_s = self._clock.now(), self._cpu_s()

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_ours(optimizer):
            self.others.add(type(optimizer).__name__)
            return
        now, cpu_s = self._clock.now(), self._cpu_s() - self._stepping_cpu_s
        is_first = bool(self._passes)  # of this step's optimizers
        if is_first and self.peak is not None:
            self.peak.step_ended()
        if is_first and self.when_resumed is not None:
            self.when_resumed()
            now = self._clock.now()  # the time of that call belongs to no step
        elif is_first and self._ended is not None:
            taken = (self._passes, self._stepping, now, self._fetches, self._num_calls, self._num_steps)
            self._marks.append(_Marks(self._ended, *taken, cpu_s))
        self._num_steps += 1
        if is_first:
            self._gradients.step_ended()
        elif self._num_calls:  # no watched parameter got a gradient: others may have
            self._gradients.see_all()
        self._ended, self._stepping = now, None
        self._reset()
        if len(self._marks) == self.num_kept:
            self.settle()
            listeners = [then for then in (self.log, self.when_full) if then is not None]
            for then in listeners:
                then()
            if listeners:
                self.clear()
                self.restart()  # the time of those calls belongs to no step

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds this model's parameters."""
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])


@dataclass(frozen=True, slots=True)
class _Pass:
    """Clock times of one forward and backward pass."""

    begun: Any  # call of the model, or of DDP around it
    inside: Any  # call of the model inside DDP, after any broadcast of buffers
    returned: Any  # return of the model's last call
    gradient: Any  # this rank's last gradient
    reduced: Any  # end of backward


@dataclass(frozen=True, slots=True)
class _Marks:
    """Clock times of one step, and its calls of the model."""

    ended: Any  # end of the previous optimizer step
    passes: list[_Pass]
    stepping: Any
    end: Any
    fetches: list[tuple[Any, Any]]
    num_calls: int
    number: int
    optimizer_cpu_s: float


class CallHook:
    """Calls `then` before or after every call of `model`, outside of torch.compile's traces.

    Copies and pickles of the model get a hook that does nothing.
    """

    def __init__(self, model: torch.nn.Module, then: Callable[[], None], *, after: bool = False) -> None:
        self._then = then
        self._hook = model.register_forward_hook(self) if after else model.register_forward_pre_hook(self)

    @untraced("it takes the time")
    def __call__(self, *_: Any) -> None:
        """Call `then`."""
        self._then()

    def __reduce__(self) -> Any:
        return NoHook().__reduce__()

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def _queue(then: Callable[[], None]) -> None:
    """Call `then` at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callable of a method that holds its object weakly, so that its owner may free it."""
    bound: Any = method
    here, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: Any) -> None:
        timer = here()
        if timer is not None:
            function(timer, *args)

    return call

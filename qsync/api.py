"""The public verbs that need a model, wired from the rooms that do the work. Those that need none:
planning.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from qsync import backend
from qsync.backend.device_detection import candidates, detect_class, device_of, machine
from qsync.errors import CalibrationError, QSyncError, UnsupportedError
from qsync.predictor.profiling.clocks import clock_for
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.registry import Indicator, indicator_named
from qsync.predictor.sensitivity.variance import variance
from qsync.records.cluster import DeviceClass
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.runtime import program as runtime
from qsync.runtime.activation_recomputation import recompute
from qsync.tracing.tracer import call_arguments, capture, check_batch, undisturbed

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]

__all__ = ["capture", "profile", "sensitivity", "wrap"]


def profile(
    model: torch.nn.Module,
    example_inputs: Any,
    loss_fn: LossFunction | None = None,
    *,
    device_class: DeviceClass | None = None,
    precisions: Sequence[Precision | str] | None = None,
    rounds: int | None = None,
    seconds: float = 30.0,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    progress: Callable[[str], None] = lambda text: None,
    save_less: bool = False,
    loader: Iterable[Any] | None = None,
) -> Profile:
    """Measure what each operator takes at each precision on this device, inside running steps of the real
    model.

    `loss_fn(model, batch)` runs the model on a batch and returns a scalar; without it the model's own `.loss`
    is used. Takes as many steps as are needed to know one to half a per cent, in at most `seconds` (each
    once and the first twice in any case), or `rounds` of them. With `save_less` following operators are
    also timed as they run when they save less for backward (`Plan.save_less`), which takes twice as long.
    From `loader` a batch is taken before every step, and only timed: pass what the training loop iterates (a
    DataLoader, or a generator that also moves batches to the device), and the profile knows how long a step
    waits for it (`Profile.loading_s`); without it data loading is no part of what is predicted. The model's
    weights, buffers, gradients and the random state are as before afterwards. Times are in seconds. Raises
    CalibrationError for an empty batch, a loader that gives none or a loss that is not finite, TracingError
    for a model that cannot be traced.

    >>> profile = qsync.profile(model, batch)
    >>> profile = qsync.profile(model, batch, loader=DataLoader(dataset, 8, num_workers=2))
    """
    if rounds is not None and rounds < 1:
        raise CalibrationError(
            f"rounds must be at least 1, found {rounds}; leave it out for as many as needed"
        )
    device = device_of(model)
    chosen_class = device_class or detect_class(device)
    chosen = precisions_to_profile(chosen_class, precisions)
    loss, trained = loss_of(model, example_inputs, loss_fn), trained_parameters(model)
    with running(model) as program:
        clock = clock_for(device, chosen_class.emulated_share)
        with naming_operators(program, loss, trained):
            options = ProfilerOptions(make_optimizer, progress, save_less, loader)
            profiler = Profiler(program, loss, trained, chosen, clock, options)
            if rounds is None:
                profiler.fill(seconds)
            for _ in range(rounds or 0):
                profiler.round()
        return profiler.profile(chosen_class.name, machine(device), chosen_class.emulated_share)


@contextmanager
def naming_operators(
    program: runtime.Program, loss: Callable[[], torch.Tensor], trained: Sequence[torch.nn.Parameter]
) -> Iterator[None]:
    """A CalibrationError inside comes out as one that names the operator that met NaN or Inf, if one did."""
    try:
        yield
    except CalibrationError:
        variance(Calibration(program, [loss], trained, []))
        raise


def precisions_to_profile(
    device_class: DeviceClass, precisions: Sequence[Precision | str] | None = None
) -> tuple[Precision, ...]:
    """The given precisions, or those worth choosing from. Raises UnsupportedError for one the class lacks."""
    chosen = tuple(Precision.parse(p) for p in precisions) if precisions else candidates(device_class)
    for precision in chosen:
        if precision not in device_class.precisions:
            known = ", ".join(device_class.precisions)
            raise UnsupportedError(f"{device_class.name} has no {precision}; it has {known}")
    return chosen


def sensitivity(
    model: torch.nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction | None = None,
    *,
    indicator: str = "variance",
    precisions: Sequence[Precision | str] | None = None,
    seed: int = 0,
) -> Sensitivity:
    """How much gradient variance each operator adds at each precision, from two FP32 steps per batch.

    `indicator` names another way to tell (see qsync.predictor.sensitivity.registry): "empirical" measures it with this
    device's kernels, a step per operator, precision and batch. `seed` is for what an indicator draws. The
    model is left as it was. Raises CalibrationError for NaN or Inf in the data, naming the operator that met
    it, and for a gradient that is zero; UnsupportedError for an indicator or a precision that is not there.

    >>> sensitivity = qsync.sensitivity(model, [batch])
    >>> truth = qsync.sensitivity(model, [batch], indicator="empirical", precisions=["bf16", "int8"])
    """
    judge = indicator_named(indicator)
    if isinstance(batches, torch.Tensor) or hasattr(batches, "keys"):
        raise CalibrationError("batches must be a list of batches, found one batch; pass [batch]")
    with calibrating(model, batches, loss_fn, precisions=precisions, seed=seed) as calibration:
        return _judged(
            judge, calibration if indicator != "empirical" else _measurable(calibration, model, precisions)
        )


def _judged(judge: Indicator, calibration: Calibration) -> Sensitivity:
    """What an indicator says. Where that is NaN, or zero everywhere, the default one looks why: it names the
    operator that met NaN or Inf, or from which on the gradient is zero.
    """
    if judge is variance:
        return variance(calibration)
    looked = replace(calibration, precisions=())
    try:
        found = judge(calibration)
    except CalibrationError:
        variance(looked)
        raise
    scores = [(op, mode, score) for op, modes in found.omega.items() for mode, score in modes.items()]
    if not any(0.0 < score < math.inf for *_, score in scores) or any(math.isnan(s) for *_, s in scores):
        variance(looked)
    for op, mode, score in scores:
        if not math.isfinite(score):
            raise CalibrationError(
                f"the {found.indicator} score of {op} at {mode} is {score}; clean the batch"
            )
    return found


@contextmanager
def calibrating(
    model: torch.nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction | None = None,
    *,
    precisions: Sequence[Precision | str] | None = None,
    seed: int = 0,
) -> Iterator[Calibration]:
    """What indicators are given: the model as it runs precisions, its batches and its trained parameters."""
    chosen = [Precision.parse(p) for p in precisions] if precisions else list(Precision)
    losses = [loss_of(model, batch, loss_fn) for batch in batches]
    with running(model) as program:
        yield Calibration(program, losses, trained_parameters(model), chosen, seed)


def _measurable(
    calibration: Calibration, model: torch.nn.Module, asked: Sequence[Precision | str] | None
) -> Calibration:
    """With the precisions that this device has: what is measured has to run here."""
    kernels = backend.select(device_of(model))
    if asked is None:
        return replace(calibration, precisions=kernels.precisions())
    for precision in calibration.precisions:
        if precision not in kernels.precisions():
            known = ", ".join(kernels.precisions())
            raise UnsupportedError(f"{kernels.device} has no {precision} to measure; it has {known}")
    return calibration


def wrap(
    model: torch.nn.Module,
    plan: Plan | str | Precision,
    *,
    device_class: str | None = None,
    save_less: bool = False,
) -> torch.nn.Module:
    """Make the model run as the plan says for a device class, or in one precision wherever that is possible.

    In place: the same object, class and state_dict keys. The graph is traced at the first call and compared
    with the plan's. With `save_less` every operator that can saves less for backward, at the price of some
    time and, where it keeps eight bits, of some gradient error (see qsync.backend.compressed_saves.saved_ops); without it those
    that the plan names (`Plan.save_less`). An operator that no kernel serves in the one precision runs in the
    next one up, with a warning. Raises MismatchError for a plan of another model or class, UnsupportedError
    for a precision that the device does not have.

    >>> model = qsync.wrap(model, plan, device_class="infer")
    >>> model = qsync.wrap(model, "bf16", save_less=True)
    """
    if isinstance(plan, str):
        precision = Precision.parse(plan)
        kernels = backend.select(device_of(model))
        if precision not in kernels.precisions():
            known = ", ".join(kernels.precisions())
            raise UnsupportedError(f"{kernels.device} has no {precision}; it has {known}")
        everything = runtime.saving(["*"]) if save_less else None
        runtime.attach(model, runtime.uniform(precision, kernels), saving_less=everything)
        return model
    if device_class is None:
        if len(plan.classes) > 1:
            raise UnsupportedError(
                f"name the device class of this rank: device_class= one of {', '.join(plan.classes)}"
            )
        device_class = next(iter(plan.classes))
    assignment = plan[device_class].assignment
    available = backend.select(device_of(model)).precisions()
    for op, precision in assignment.items():
        if precision not in available:
            raise UnsupportedError(
                f"the plan runs {op} in {precision} on {device_class}, but this device has only "
                f"{', '.join(available)}; name this device's own class, or plan again"
            )
    recomputed = plan.levers[device_class].recomputed if plan.levers else ()
    saving_less = runtime.saving(["*"] if save_less else plan[device_class].saving_less, recomputed)
    recompute(model, recomputed)
    runtime.attach(model, runtime.following(assignment), plan.check_graph, saving_less)
    return model


def trace_step(model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None) -> OpGraph:
    """The graph of the model as `loss_fn` calls it: like `capture`, for a batch that holds targets too."""
    loss = loss_of(model, batch, loss_fn)
    with running(model) as program:
        loss()
        if not program.lowered:
            capture(model, batch)  # says why there is nothing to trace
        return program.graph


class running:
    """The model attached to a program for as long as something is measured on it, and left as it was."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._undisturbed = undisturbed(model)

    def __enter__(self) -> runtime.Program:
        self._before = self._model._compiled_call_impl
        self._program = runtime.programs.get(self._model)
        self._undisturbed.__enter__()
        return runtime.attach(self._model, lambda graph: {})

    def __exit__(self, *failure: Any) -> None:
        runtime.detach(self._model)
        self._model._compiled_call_impl = self._before
        if self._program is not None:
            runtime.programs[self._model] = self._program
        self._undisturbed.__exit__(*failure)


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that training changes. Raises CalibrationError where there are none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise CalibrationError(
            f"no parameter of {type(model).__name__} requires a gradient; nothing would be trained"
        )
    return trained


def loss_of(model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None) -> Callable[[], torch.Tensor]:
    """What runs the model on this batch and returns its loss. Raises CalibrationError for an empty batch."""
    if batch is None:
        raise CalibrationError("there is no example batch; pass one real batch, as the model is trained on")
    args, kwargs = call_arguments(batch)
    check_batch(args, kwargs)
    if loss_fn is not None:
        return lambda: loss_fn(model, batch)

    def own_loss() -> torch.Tensor:
        output = model(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if loss is None:
            raise QSyncError(
                f"{type(model).__name__} returns no .loss; "
                "pass loss_fn=lambda model, batch: ... that returns a scalar"
            )
        return loss

    return own_loss

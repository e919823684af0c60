"""`profile`: measure what a model's operators cost on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch

from qsync.api.training_step import LossFunction, loss_of, running, trained_parameters
from qsync.backend.devices.device_detection import detect_class, device_of, machine
from qsync.backend.precisions_that_pay import precisions_to_profile
from qsync.errors import CalibrationError, shortened
from qsync.operators.precision import Precision
from qsync.predictor.profiling.clocks import clock_for
from qsync.predictor.profiling.loader_wait import undrawn
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.variance import variance
from qsync.records.cluster import DeviceClass
from qsync.records.json_files import check_kind
from qsync.records.profiles import Profile
from qsync.runtime.program import Program


def profile(
    model: torch.nn.Module,
    example_inputs: Any,
    loss_fn: LossFunction | None = None,
    *,
    device_class: DeviceClass | None = None,
    precisions: Sequence[Precision | str] | None = None,
    rounds: int | None = None,
    seconds: float = 30.0,
    make_optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    progress: Callable[[str], None] = lambda text: None,
    save_less: bool = False,
    loader: Iterable[Any] | None = None,
    bitwise: bool = False,
) -> Profile:
    """Measure each operator's time at each precision on this device, in real training steps.

    Restores the model's weights, buffers, gradients and the random state afterwards.

    Args:
        model: runs where its parameters are; its hooks and `torch.compile` stay.
        example_inputs: a real batch: a tensor, a tuple (positional) or a dict (keywords), or any batch that
            `loss_fn` accepts.
        loss_fn: `loss_fn(model, batch)` runs the model on a batch and returns a scalar. Default: the model
            output's `.loss`.
        device_class: this device's class, instead of the detected one.
        precisions: the precisions to time, instead of all that the device has in hardware.
        rounds: number of rounds; each takes a step at every precision and at mixtures of them. Default: until
            times are known to 0.5 %.
        seconds: time limit of the measurement without `rounds`; every step runs at least once, the first
            twice.
        make_optimizer: the training loop's optimizer from parameters, or a list of several. Its time is
            part of a step.
        progress: is called with a text about the current work.
        save_less: time following operators also as they save less for backward (`Plan.save_less`). This takes
            twice as long.
        loader: the training loop's iterable of batches (a DataLoader, or a generator that also moves them to
            the device). One batch is drawn and timed before every step (`Profile.loading_s`). Without it
            predictions ignore data loading.
        bitwise: measure FP32 with torch's own kernels, not the fastest ones, for a bitwise plan.

    Returns:
        The profile: seconds by operator and precision, casts, bytes and costs outside of the graph.

    Raises:
        CalibrationError: an empty batch, a loader without batches, or a loss that is not finite.
        TracingError: the model cannot be traced.
        UnsupportedError: the device lacks a precision.

    Example:
        >>> profile = qsync.profile(model, batch)
        >>> profile = qsync.profile(model, batch, loader=DataLoader(dataset, 8, num_workers=2))
    """
    if rounds is not None and (type(rounds) is not int or rounds < 1):
        raise CalibrationError(
            f"rounds must be at least 1, found {shortened(rounds)}; leave it out to let qsync choose"
        )
    if not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise CalibrationError(f"seconds must be a number of at least 0, found {shortened(seconds)}")
    check_kind(device_class, (DeviceClass, NoneType), "device_class", "qsync.DeviceClass")
    device = device_of(model)
    chosen_class = device_class or detect_class(device)
    chosen = precisions_to_profile(chosen_class, model, precisions)
    loss, trained = loss_of(model, example_inputs, loss_fn), trained_parameters(model)
    # Draw one batch for the graph's shapes, without using up the loader's data.
    with undrawn(loader), running(model, loss, dynamic=False, bitwise=bitwise) as program:
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
    program: Program, loss: Callable[[], torch.Tensor], trained: Sequence[torch.nn.Parameter]
) -> Iterator[None]:
    """Re-raise a CalibrationError with the name of the operator that met NaN or Inf, if any."""
    try:
        yield
    except CalibrationError:
        variance(Calibration(program, [loss], trained, []))
        raise

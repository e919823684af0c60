"""The public functions that need a model: capture, profile, sensitivity, wrap. The others: planning."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from qsync import backend
from qsync.backend.devices.device_detection import detect_class, device_of, machine
from qsync.backend.precisions_that_pay import precisions_to_profile
from qsync.errors import (
    CalibrationError,
    FormatError,
    QSyncError,
    TracingError,
    UnsupportedError,
    nearest,
    not_called,
    shortened,
)
from qsync.operators.precision import Precision
from qsync.predictor.profiling.clocks import clock_for
from qsync.predictor.profiling.loader_wait import undrawn
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.empirical import empirical
from qsync.predictor.sensitivity.variance import variance
from qsync.records.cluster import DeviceClass
from qsync.records.graph import OpGraph
from qsync.records.json_files import check_kind
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.runtime import planned_forward
from qsync.runtime.activation_recomputation import recompute
from qsync.runtime.program import Program
from qsync.runtime.wrapping import Wrapping, wrapped_module
from qsync.tracing.held_state import HeldState, first_call, leaving_gradients, undisturbed
from qsync.tracing.replaced_forward import running_plain
from qsync.tracing.tracer import call_arguments, capture, check_batch

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
INDICATORS = ("variance", "empirical")

__all__ = ["capture", "profile", "sensitivity", "unwrap", "wrap"]


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


def sensitivity(
    model: torch.nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction | None = None,
    *,
    indicator: str = "variance",
    precisions: Sequence[Precision | str] | None = None,
    seed: int = 0,
) -> Sensitivity:
    """Estimate the gradient variance that each operator adds at each precision.

    The default indicator takes two FP32 steps per batch. The model is restored afterwards.

    Args:
        model: runs where its parameters are.
        batches: a list of real batches, each as for `qsync.profile`.
        loss_fn: `loss_fn(model, batch)` returns a scalar. Default: the model output's `.loss`.
        indicator: "variance" estimates; "empirical" measures the variance with this device's kernels: a step
            per operator, precision and batch.
        precisions: the precisions to estimate, instead of all (with "empirical": all of this device).
        seed: for the random numbers.

    Returns:
        The sensitivity: operator -> precision -> variance in squared gradient norm.

    Raises:
        CalibrationError: NaN or Inf in the data (the message names the operator that met it), a gradient that
            is zero, or no batch.
        UnsupportedError: an unknown indicator, or a precision that this device cannot measure.

    Example:
        >>> sensitivity = qsync.sensitivity(model, [batch])
        >>> truth = qsync.sensitivity(model, [batch], indicator="empirical", precisions=["bf16", "int8"])
    """
    if indicator not in INDICATORS:
        close, known = nearest(str(indicator), INDICATORS), ", ".join(INDICATORS)
        raise UnsupportedError(f"unknown indicator {shortened(indicator)}{close}; choose one of {known}")
    if isinstance(batches, torch.Tensor) or hasattr(batches, "keys"):
        raise CalibrationError("batches must be a list of batches, found one batch; pass [batch]")
    if not isinstance(batches, Iterable):
        raise CalibrationError(f"batches must be a list of batches, found {shortened(batches)}; pass [batch]")
    batches = list(batches)
    with calibrating(model, batches, loss_fn, precisions=precisions, seed=seed) as calibration:
        if indicator == "variance":
            found = variance(calibration)
        else:
            found = _truth(_measurable(calibration, model, precisions))
    if not found.omega:
        raise not_called(type(model).__name__)
    return _as_loaded(found, trace_step(model, batches[0], loss_fn)) if in_bf16(model) else found


def _as_loaded(found: Sensitivity, graph: OpGraph) -> Sensitivity:
    """Rename the sensitivity of a BF16 model's FP32 twin to the operators of the BF16 graph."""
    lacking = [op.name for op in graph.adjustable if op.name not in found.omega]
    if lacking:
        raise CalibrationError(
            f"{graph.model} has no operator {lacking[0]} when its weights are in FP32; load it in FP32, and "
            'give base="bf16"'
        )
    return replace(
        found, graph_hash=graph.hash, omega={op.name: found.omega[op.name] for op in graph.adjustable}
    )


def _truth(calibration: Calibration) -> Sensitivity:
    """Measure the sensitivity with this device's kernels.

    For a NaN or zero gradient the estimate raises first: its error names the operator that met NaN or Inf, or
    from which on the gradient is zero.
    """
    without_scores = replace(calibration, precisions=())
    try:
        found = empirical(calibration)
    except CalibrationError:
        variance(without_scores)
        raise
    if not any(score > 0.0 for modes in found.omega.values() for score in modes.values()):
        variance(without_scores)
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
    """Prepare a model for sensitivity indicators: yield its program, batches and trained parameters.

    A BF16 model and BF16 batches are in FP32 inside: lower precisions are measured against FP32.
    """
    chosen = [Precision.parse(p) for p in precisions] if precisions else list(Precision)
    device_of(model)  # raises if it is not a module
    if in_bf16(model):
        batches = [tree_map(_widened, batch) for batch in batches]
    losses = [loss_of(model, batch, loss_fn) for batch in batches]
    if not losses:
        raise CalibrationError("no calibration batch was given; pass at least one real batch")
    # One batch is traced as in profiling: a number that a loop changes does not start another graph.
    dynamic = False if len(batches) == 1 else None
    alone = in_bf16(model)
    with _in_fp32(model), running(model, losses[0], dynamic=dynamic, alone=alone) as program:
        # State that the model keeps between calls must be equal in all compared steps.
        held = HeldState(model, losses, weights=False)
        losses = [partial(_from, held, loss) for loss in losses]
        yield Calibration(program, losses, trained_parameters(model), chosen, seed)


def _from(held: HeldState, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    held.restore()
    return loss()


def in_bf16(model: torch.nn.Module) -> bool:
    """Return whether a model has parameters in BF16."""
    return any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())


@contextmanager
def _in_fp32(model: torch.nn.Module) -> Iterator[None]:
    """Hold a model's BF16 tensors in FP32 inside the context; restore them bitwise afterwards.

    Raises CalibrationError for a model that fails in FP32 because it casts to BF16 by itself.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype is torch.bfloat16]
    if not tensors:
        yield
        return
    with undisturbed(model):
        before = [tensor.data for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data = tensor.data.float()
            yield
        except (RuntimeError, TracingError, CalibrationError) as error:
            if isinstance(error, CalibrationError) and not isinstance(error.__cause__, RuntimeError):
                raise  # an error of the data; other errors mean that torch could not run the first call
            raise CalibrationError(
                f"{type(model).__name__} fails with its weights in FP32, which the sensitivity "
                f'needs ({shortened(error, quote=False)}); load it in FP32, and give base="bf16"'
            ) from error
        finally:
            for tensor, data in zip(tensors, before, strict=True):
                tensor.grad = None
                tensor.data = data


def _saved_for_backward(value: Any) -> Any:
    """Return a tensor that autograd can save: a copy if it was made in inference mode."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value


def _widened(value: Any) -> Any:
    is_bf16 = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_bf16 else value


def _measurable(
    calibration: Calibration, model: torch.nn.Module, asked: Sequence[Precision | str] | None
) -> Calibration:
    """Return the calibration with this device's precisions: measured variances need its kernels."""
    kernels = backend.select(device_of(model))
    if asked is None:
        return replace(calibration, precisions=kernels.precisions())
    for precision in calibration.precisions:
        if precision not in kernels.precisions():
            known = ", ".join(kernels.precisions())
            raise UnsupportedError(f"{kernels.device} cannot run {precision}; choose from {known}")
    return calibration


def wrap(
    model: torch.nn.Module,
    plan: Plan | str | Precision | None = None,
    *,
    device_class: str | None = None,
    save_less: bool = False,
    base: str | None = None,
    strict: bool = False,
    bitwise: bool = False,
) -> torch.nn.Module:
    """Make the model run under a plan, or in one precision wherever that is possible.

    Works in place: the object, its class and its state_dict keys stay. The plan applies to `model(x)`,
    `model.forward(x)`, copies, pickles and torch.compile around the model. Other methods (`model.encode(x)`)
    and separate calls of inner modules run as before. The graph is traced at the first call and compared with
    the plan's; one line on stderr reports how much of it is lowered. `qsync.unwrap` restores the model.

    Args:
        model: runs where its parameters are. Inside torch.compile or DDP it is the inner module.
        plan: a plan, or one precision by name. An operator without a kernel in this precision runs in the
            next higher one, with a warning. So does an operator that is faster there: each shape is timed
            once per machine, at the first call, and the line on stderr names the moved operators.
        device_class: the class of this rank in the plan. Not needed for a plan of one class.
        save_less: compress the saved tensors of every operator that can, not only those that the plan names
            (`Plan.save_less`). This costs some time and, where eight bits are saved, some gradient error (see
            qsync.backend.compressed_saves.saved_ops).
        base: "tf32", "bf16" or "fp16": the precision of operators that torch.autocast lowers, unless the plan
            lowers them further. The model may be called inside torch.autocast of this type; qsync decides the
            casts there too.
        strict: run operators in the one precision even if they are slower there.
        bitwise: compute FP32 bitwise as torch does, not by the CPU's fastest kernels. A plan sets this
            itself, from its profiles.

    Returns:
        The model.

    Raises:
        MismatchError: the plan is of another model, or has no such class.
        UnsupportedError: the device does not have a precision, or the model is in DataParallel, FSDP or
            TorchScript.

    Example:
        >>> model = qsync.wrap(model, plan, device_class="infer")
        >>> model = qsync.wrap(model, "bf16", save_less=True)
        >>> model = qsync.wrap(model, base="bf16")
    """
    return _take_over(model, Wrapping.of(plan, device_class, save_less, base, strict, bitwise))


def wrap_as(
    model: torch.nn.Module,
    plan: Plan,
    device_class: str,
    speaks: bool,
    program: Program | None = None,
    bitwise: bool = False,
) -> torch.nn.Module:
    """Wrap the model of a job.

    `speaks`: this rank prints the line about lowered operators. `program` has already traced this very model
    during profiling; its graphs are reused.
    """
    asked = Wrapping.of(plan, device_class, False, bitwise=bitwise)
    asked = replace(asked, speaks=speaks, fits=program is not None)
    return _take_over(model, asked, program)


def _take_over(model: torch.nn.Module, asked: Wrapping, program: Program | None = None) -> torch.nn.Module:
    module = wrapped_module(model)
    asked.check(module)
    recompute(module, asked.recomputed)
    planned_forward.take_over(module, asked, program)
    return model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Restore a wrapped model to plain torch, in place; weights and hooks stay.

    Recomputation is removed; another library's forward around the plan (Accelerate's autocast) stays.

    Args:
        model: a model that `qsync.wrap` wrapped, a copy of it, or the result of `qsync.hybrid` (its
            DistributedDataParallel is removed).

    Returns:
        The plain model.

    Raises:
        MismatchError: the model is not wrapped.

    Example:
        >>> torch.export.export(qsync.unwrap(copy.deepcopy(model)), (x,))
    """
    module = wrapped_module(model)
    planned_forward.program_of(module)
    recompute(module, ())
    planned_forward.detach(module)
    return module if isinstance(model, DistributedDataParallel) else model


def trace_step(model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None) -> OpGraph:
    """Capture the graph of the model as `loss_fn` calls it, on a batch that holds targets too.

    Returns the graph of the last call, with the number of calls with gradients.
    """
    loss = loss_of(model, batch, loss_fn)
    with running(model, loss, dynamic=False) as program:
        program.forget()
        loss()
        if not program.lowered:
            capture(model, batch)  # raises with the reason why nothing can be traced
            raise not_called(type(model).__name__)
        return replace(program.graph, num_calls=max(1, program.num_calls))


# The program that currently measures each model; nested measurements share it and its trace.
_measuring: weakref.WeakKeyDictionary[torch.nn.Module, Program] = weakref.WeakKeyDictionary()


@contextmanager
def running(
    model: torch.nn.Module,
    loss: Callable[[], torch.Tensor],
    dynamic: bool | None = None,
    alone: bool = False,
    bitwise: bool = False,
) -> Iterator[Program]:
    """Run a model through a tracing program inside the context; restore it afterwards.

    The model's first call runs in plain torch before, so that its initialization is not measured. A nested
    call for the same model shares the outer program, unless `alone`. `bitwise`: torch's own FP32 kernels.
    """
    outer = _measuring.get(model)
    if outer is not None and not alone:
        with undisturbed(model, loss):
            yield outer
        return
    before = planned_forward.programs.get(model)
    with undisturbed(model, loss), running_plain(model):
        first_call(model, loss)
        program = planned_forward.attach(model, lambda graph: {}, dynamic=dynamic, bitwise=bitwise)
        try:
            _measuring[model] = program
            yield program
        finally:
            planned_forward.detach(model)
            _measuring.pop(model, None)
            if outer is not None:
                _measuring[model] = outer
            if before is not None:
                planned_forward.programs[model] = before


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that require gradients. Raises CalibrationError if there are none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise CalibrationError(
            f"no parameter of {type(model).__name__} requires a gradient; unfreeze the parameters to train "
            "(requires_grad_())"
        )
    return trained


def loss_of(model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None) -> Callable[[], torch.Tensor]:
    """Return a function that runs the model and returns its loss.

    Raises CalibrationError for an empty batch, FormatError for a loss_fn with another signature.
    """
    if batch is None:
        raise CalibrationError("the example batch is missing; pass one real training batch")
    if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in tree_leaves(batch)):
        batch = tree_map(_saved_for_backward, batch)  # otherwise the user's own object
    args, kwargs = call_arguments(batch)
    if loss_fn is not None:  # loss_fn may take a batch type whose tensors only it finds
        _check_loss_fn(loss_fn)
        check_batch(args, kwargs, is_opaque=True)
        return lambda: leaving_gradients(loss_fn(model, batch))
    check_batch(args, kwargs)

    def own_loss() -> torch.Tensor:
        output = model(*args, **kwargs)
        found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if found is None:
            raise QSyncError(
                f"{type(model).__name__} returns no .loss; "
                "pass a loss_fn=lambda model, batch: ... that returns a scalar"
            )
        return leaving_gradients(found)

    return own_loss


def _check_loss_fn(loss_fn: Callable[..., object]) -> None:
    """Raise FormatError unless loss_fn takes a model and a batch; torch's own losses take tensors."""
    try:
        inspect.signature(loss_fn).bind("model", "batch")
        fits = not str(getattr(loss_fn, "__module__", "")).startswith("torch.nn.")
    except TypeError:
        fits = False
    except ValueError:  # it has no readable signature
        fits = True
    if not fits:
        raise FormatError(
            f"loss_fn must take a model and a batch, found {shortened(loss_fn)}; give, for example, "
            "lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])"
        )

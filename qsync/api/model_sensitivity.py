"""`sensitivity`: estimate what lower precisions of a model's operators do to its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from qsync import backend
from qsync.api.training_step import LossFunction, loss_of, running, trace_step, trained_parameters
from qsync.backend.devices.device_detection import device_of
from qsync.errors import CalibrationError, TracingError, UnsupportedError, nearest, not_called, shortened
from qsync.operators.precision import Precision
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.empirical import empirical
from qsync.predictor.sensitivity.variance import variance
from qsync.records.graph import OpGraph
from qsync.records.profiles import Sensitivity
from qsync.tracing.held_state import HeldState, undisturbed

INDICATORS = ("variance", "empirical")


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
    return _as_loaded(found, trace_step(model, batches[0], loss_fn)) if _in_bf16(model) else found


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
    if _in_bf16(model):
        batches = [tree_map(_widened, batch) for batch in batches]
    losses = [loss_of(model, batch, loss_fn) for batch in batches]
    if not losses:
        raise CalibrationError("no calibration batch was given; pass at least one real batch")
    # One batch is traced as in profiling: a number that a loop changes does not start another graph.
    dynamic = False if len(batches) == 1 else None
    alone = _in_bf16(model)
    with _in_fp32(model), running(model, losses[0], dynamic=dynamic, alone=alone) as program:
        # State that the model keeps between calls must be equal in all compared steps.
        held = HeldState(model, losses, weights=False)
        losses = [partial(_from, held, loss) for loss in losses]
        yield Calibration(program, losses, trained_parameters(model), chosen, seed)


def _from(held: HeldState, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    held.restore()
    return loss()


def _in_bf16(model: torch.nn.Module) -> bool:
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

"""Run a model's training step: its loss, its trained parameters, its trace."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from qsync.errors import CalibrationError, FormatError, QSyncError, not_called, shortened
from qsync.records.graph import OpGraph
from qsync.runtime import planned_forward
from qsync.runtime.program import Program
from qsync.tracing.held_state import first_call, leaving_gradients, undisturbed
from qsync.tracing.replaced_forward import running_plain
from qsync.tracing.tracer import call_arguments, capture, check_batch

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


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


def _saved_for_backward(value: Any) -> Any:
    """Return a tensor that autograd can save: a copy if it was made in inference mode."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value

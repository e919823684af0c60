"""`wrap` and `unwrap`: make a model run under a plan, in place, and restore it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from qsync.operators.precision import Precision
from qsync.records.plans import Plan
from qsync.runtime import planned_forward
from qsync.runtime.activation_recomputation import recompute
from qsync.runtime.program import Program
from qsync.runtime.wrapping import Wrapping, wrapped_module


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

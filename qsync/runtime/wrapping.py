"""Remember what `wrap` was asked for, so that every copy of a model can make its own program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from qsync import backend
from qsync.backend.device_detection import device_of
from qsync.errors import FormatError, UnsupportedError, shortened
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.runtime import coverage
from qsync.runtime.program import NO_DATA_PARALLEL, Program, following, saving, uniform


@dataclass(frozen=True, slots=True)
class Wrapping:
    """One precision for all operators, or a plan and the device class in it. It makes a model's program.

    A record without torch objects: it is copied and pickled with the model.
    """

    precision: Precision | None
    plan: Plan | None
    device_class: str
    save_less: bool

    @classmethod
    def of(cls, plan: Plan | str, device_class: str | None, save_less: bool) -> Wrapping:
        """Read the arguments of `qsync.wrap`."""
        if isinstance(plan, str):
            return cls(Precision.parse(plan), None, device_class or "", save_less)
        if not isinstance(plan, Plan):
            raise FormatError(
                f"plan must be a qsync.Plan or the name of a precision, found {shortened(plan)}; load one "
                "with qsync.Plan.load"
            )
        if device_class is None:
            if len(plan.classes) > 1:
                raise UnsupportedError(
                    f"name the device class of this rank: device_class= one of {', '.join(plan.classes)}"
                )
            device_class = next(iter(plan.classes))
        plan[device_class]  # raises MismatchError for a class that it does not have
        return cls(None, plan, device_class, save_less)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Return the paths of the modules that compute forward again in backward."""
        return self.plan.levers[self.device_class].recomputed if self.plan and self.plan.levers else ()

    def check(self, model: torch.nn.Module) -> None:
        """Raise UnsupportedError where the model's device lacks a precision."""
        kernels = backend.select(device_of(model))
        available = kernels.precisions()
        if self.plan is None:
            if self.precision not in available:
                raise UnsupportedError(
                    f"{kernels.device} has no {self.precision}; it has {', '.join(available)}"
                )
            return
        for op, precision in self.plan[self.device_class].assignment.items():
            if precision not in available:
                raise UnsupportedError(
                    f"the plan runs {op} in {precision} on {self.device_class}, but this device has only "
                    f"{', '.join(available)}; name this device's own class, or plan again"
                )

    def __call__(self, model: torch.nn.Module) -> Program:
        """Make the program of a model: the wrapped one, or a copy of it."""
        self.check(model)
        if self.plan is None:
            choose = uniform(self._asked, backend.select(device_of(model)))  # type: ignore[arg-type]
            check, less = None, saving(["*"] if self.save_less else ())
        else:
            planned = self.plan[self.device_class]
            choose, check = following(planned.assignment), self.plan.check_graph
            less = saving(["*"] if self.save_less else planned.saving_less, self.recomputed)
        return Program(model, choose, check, less, self._report)

    @property
    def _asked(self) -> Mapping[str, Precision] | Precision:
        return self.precision or self.plan[self.device_class].assignment  # type: ignore[index]

    def _report(self, program: Program, is_first: bool) -> None:
        """Say what is lowered, at the first call; later only if it is little of a new graph."""
        found = coverage.products(program.lowered, self._asked, program.unsupported)
        is_good = coverage.is_mostly_lowered(found)
        if not is_good or (is_first and os.environ.get("RANK", "0") == "0"):
            where = f" on {self.device_class}" if self.device_class else ""
            coverage.say_once(coverage.sentence(found, self._asked, where), is_good)


def wrapped_module(model: Any) -> torch.nn.Module:
    """Return the module whose forward is replaced: the model, or what torch.compile or DDP holds of it.

    Raises FormatError for something else than a module, UnsupportedError for a model that runs copies of
    itself, flattened parameters or TorchScript.
    """
    if not isinstance(model, torch.nn.Module):
        raise FormatError(f"model must be a torch.nn.Module, found {shortened(model)}; give that")
    if isinstance(model, torch._dynamo.OptimizedModule):
        return wrapped_module(model._orig_mod)
    if isinstance(model, DistributedDataParallel):
        return wrapped_module(model.module)
    kind = type(model).__name__
    if isinstance(model, DataParallel):
        raise UnsupportedError(NO_DATA_PARALLEL)
    if kind == "FullyShardedDataParallel":
        raise UnsupportedError(
            f"{kind} has flattened the parameters; wrap the model first, then apply fully_shard to its blocks"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{kind} is TorchScript, which cannot be traced; wrap the module it was made from"
        )
    return model

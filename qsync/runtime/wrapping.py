"""Remember the arguments of `wrap`, so that every copy of a model can build its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

import qsync
from qsync import backend
from qsync.backend.devices.device_detection import device_of
from qsync.backend.precisions_that_pay import emulation_note
from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.operators.precision import FLOATS, Precision
from qsync.processes.progress import is_rank_zero
from qsync.records.base import bases_of, check_base, is_below, parse_base
from qsync.records.plans import Plan
from qsync.records.profiles import shown_shapes
from qsync.runtime import coverage
from qsync.runtime.choosers import Chooser, at_base, following, saving, uniform
from qsync.runtime.coverage import Coverage, listed
from qsync.runtime.planned_forward import PlannedForward, programs, take_over
from qsync.runtime.program import Program
from qsync.runtime.sharded_blocks import Block, blocks_apart
from qsync.tracing.replaced_forward import NO_DATA_PARALLEL, standing_forward


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A model's wrapping: one precision, or a plan with a device class; calling it builds a program.

    It has no torch objects, and is copied and pickled with the model. With a `base`, operators that cannot
    have the one precision run in the base. `speaks`: report coverage on stderr. `strict`: use the one
    precision even where it is slower. `bitwise`: use torch's own FP32 kernels.
    """

    precision: Precision | None
    plan: Plan | None
    device_class: str
    save_less: bool
    base: Precision
    speaks: bool = field(default_factory=is_rank_zero)
    path: str | None = None  # the module's path in a model with sharded blocks; empty for the model itself
    strict: bool = False
    fits: bool = False  # the plan was made for this model, whose first call may take another branch
    bitwise: bool = False

    @classmethod
    def of(
        cls,
        plan: Plan | str | None,
        device_class: str | None,
        save_less: bool,
        base: str | None = None,
        strict: bool = False,
        bitwise: bool = False,
    ) -> Wrapping:
        """Read the arguments of `qsync.wrap`."""
        make = partial(cls, strict=strict, bitwise=bitwise)
        own_base = parse_base(base) if base is not None else None
        if plan is None and own_base is not None:
            return make(None, None, device_class or "", save_less, own_base)
        if isinstance(plan, str):
            precision = Precision.parse(plan)
            if own_base is not None and precision != own_base and not is_below(precision, own_base):
                raise FormatError(f"{precision} is not below the base {own_base}; leave out one of them")
            own_base = own_base or (precision if precision in FLOATS else Precision.FP32)
            return make(precision, None, device_class or "", save_less, own_base)
        if not isinstance(plan, Plan):
            raise FormatError(
                f"plan must be a qsync.Plan or the name of a precision, found {shortened(plan)}; load one "
                "with qsync.Plan.load"
            )
        if device_class is None:
            if len(plan.classes) > 1:
                raise UnsupportedError(
                    "the plan has several device classes; give device_class= one of "
                    f"{', '.join(plan.classes)}"
                )
            device_class = next(iter(plan.classes))
        own = plan[device_class]  # raises MismatchError for an unknown class
        if own_base is not None:
            check_plan_base(plan, own_base)
        if bitwise and not own.bitwise:
            raise MismatchError(
                f"the plan runs FP32 by the fastest kernels on {device_class}; leave out bitwise, or "
                "profile and plan again with bitwise=True"
            )
        return make(None, plan, device_class, save_less, plan.base, bitwise=own.bitwise)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Wrapping:
        """Read the JSON of `to_json`."""
        plan = Plan.from_json(value["plan"]) if value["plan"] is not None else None
        precision = Precision.parse(value["precision"]) if value["precision"] is not None else None
        return cls(**{**value, "plan": plan, "precision": precision, "base": parse_base(value["base"])})

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        plan = self.plan.to_json() if self.plan is not None else None
        precision = str(self.precision) if self.precision is not None else None
        return {**own, "plan": plan, "precision": precision, "base": str(self.base)}

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("wrapping", self.to_json())

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapping:
        return self

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Return the paths of the modules that backward recomputes."""
        return self.plan.levers_of(self.device_class).recomputed if self.plan else ()

    @property
    def as_torch(self) -> bool:
        """Return whether a plan neither lowers this class nor replaces FP32 kernels."""
        if self.plan is None or self.save_less or self.recomputed or not self.bitwise:
            return False
        planned = self.plan[self.device_class]
        return not planned.saving_less and set(planned.assignment.values()) <= {Precision.FP32}

    def check(self, model: torch.nn.Module) -> None:
        """Raise UnsupportedError if the model's device lacks a precision."""
        kernels = backend.select(device_of(model))
        available = kernels.precisions()
        if self.plan is None:
            if self.precision != self.base:
                check_base(self.base, bases_of(kernels.device.type, available))
            if (self.precision or self.base) not in available:
                raise UnsupportedError(
                    f"{kernels.device} does not support {self.precision}; choose from {', '.join(available)}"
                )
            return
        for op, precision in self.plan[self.device_class].assignment.items():
            if precision not in available:
                raise UnsupportedError(
                    f"the plan runs {op} in {precision} on {self.device_class}, but this device supports "
                    f"only {', '.join(available)}; give this device's own class, or plan again"
                )

    def __call__(self, model: torch.nn.Module) -> Program:
        """Build the program of a model: the wrapped one, or a copy of it."""
        self.check(model)
        report = self._report if self.speaks else None
        make = partial(Program, model, base=self.base, bitwise=self.bitwise)
        if self.plan is None:
            less, strict = saving(["*"] if self.save_less else ()), self.strict or self.precision is None
            return make(choose=self._choice(model), saving_less=less, report=report, strict=strict)
        planned = self.plan[self.device_class]
        make = partial(make, as_torch=self.as_torch, carries_16bit=planned.carries_16bit)
        if self.path is not None:
            block = Block(self.path, planned.assignment)
            report = None if self.path else report  # one report for all blocks
            return make(choose=block.choose, check=block.check, report=report, is_part=True)
        less = saving(["*"] if self.save_less else planned.saving_less, self.recomputed)
        check = None if self.fits else self.plan.check_graph
        return make(choose=following(planned.assignment), check=check, saving_less=less, report=report)

    def for_shards(self, model: torch.nn.Module) -> Wrapping:
        """Wrap every block of a sharded model with its part of the plan; return the rest's wrapping.

        A single precision needs no parts. Raises UnsupportedError for a plan that saves less.
        """
        if self.fits and self.as_torch:
            return self
        blocks = list(blocks_apart(model)) if self.plan is not None else []
        if self.plan is None or not blocks:
            return self
        if self.save_less or self.plan[self.device_class].saving_less:
            raise UnsupportedError(
                "sharded models do not support a plan whose operators save less; plan without saving_less"
            )
        here = self.path or ""
        for path, block in blocks:
            take_over(block, replace(self, path=f"{here}.{path}".strip(".")))
        return replace(self, path=here)

    def _choice(self, model: torch.nn.Module) -> Chooser:
        """Return the chooser of the one precision, or of the base for operators that cannot have it."""
        kernels = backend.select(device_of(model), self.bitwise)
        base = at_base(self.base, kernels)
        if self.precision is None:
            return base
        low = uniform(self.precision, kernels)
        return lambda graph: {
            **base(graph),
            **{op: p for op, p in low(graph).items() if p is self.precision or p is not Precision.FP32},
        }

    @property
    def _batch(self) -> tuple[tuple[int, ...], ...]:
        """Return the batch shapes of the plan; none with levers, which change a rank's batch."""
        return self.plan.batch if self.plan is not None and self.plan.levers is None else ()

    @property
    def _asked(self) -> Mapping[str, Precision] | Precision:
        return self.plan[self.device_class].assignment if self.plan else self.precision or self.base

    def _report(self, program: Program, is_first: bool) -> None:
        """Report coverage at the first call, and later if a new graph is mostly not lowered.

        Warn once if the plan was made for other batch shapes.
        """
        found, is_good = self.covered(program)
        if not is_good or is_first:
            coverage.say_once(found.line, is_good)
        if self.path is None and program.lowered and torch.is_grad_enabled() and not program.met_other_shapes:
            self._report_shapes(program, is_first)

    def _report_shapes(self, program: Program, is_first: bool) -> None:
        planned, found = (
            [shape for shape in of if shape] for of in (self._batch, program.graph.batch_shapes)
        )
        if program.skipped:  # the data decides which further layers run
            planned, found = planned[:1], found[:1]
        initializes = is_first and len(found) != len(planned)  # a plan is for the second call and later ones
        if planned and not initializes and not _fit(found, planned):
            program.met_other_shapes = True
            coverage.say_once(
                f"{program.name}: a batch of {shown_shapes(found)} was never profiled: it runs as planned "
                f"for {shown_shapes(planned)}, and its time and memory are not known",
                True,
            )

    def covered(self, program: Program) -> tuple[Coverage, bool]:
        """Return the last call's coverage, and whether most of the requested FLOPs are lowered."""
        if program.runs_as_torch and not program.lowered:
            planned = self.plan[self.device_class].assignment if self.plan else {}
            kept = coverage.Row(
                Precision.FP32, "the plan leaves them: the model runs as torch runs it", (*planned,)
            )
            where = f"low precision on {self.device_class}"
            return Coverage(
                program.name, 0, where, (kept,), tuple(filter(None, [self._emulation(program)]))
            ), True
        if self.path is not None:
            return self._covered_blocks(program)
        products = coverage.products(program.lowered, self._asked, program.why_not)
        outside = coverage.layers_outside(program.model, program.graph) if program.broken else []
        notes = [self._emulation(program)] if not any(product.is_lowered for product in products) else []
        if program.skipped:
            notes.append(f"of code that torch.compile gives up only layers are lowered: {program.skipped}")
        if outside:
            why = "" if program.skipped else f": {program.broken}"
            notes.append(f"{listed(outside)} outside of what torch.compile traces, or not at all{why}")
        is_good = coverage.is_mostly_lowered(products) and bool(products or not program.skipped)
        found = Coverage.of(program.name, products, self._asked, self.device_class, notes, len(outside))
        return found, is_good and len(outside) <= len(products)

    def _covered_blocks(self, program: Program) -> tuple[Coverage, bool]:
        """Return the coverage of all blocks of a sharded model, and the plan's unused operators."""
        planned = self.plan[self.device_class].assignment if self.plan else {}
        products, ran = [], set()
        for module in program.model.modules():
            wrapping, part = wrapping_of(module), programs.get(module)
            if wrapping is not None and wrapping.path is not None and part is not None:
                block = Block(wrapping.path, planned)
                names = [
                    block.name_in_plan(op.name) for lowered in part.lowered for op in lowered.graph.adjustable
                ]
                ran |= set(names)
                asked = {op: p for lowered in part.lowered for op, p in block.choose(lowered.graph).items()}
                products += coverage.products(part.lowered, asked, part.why_not)
        missing = [op for op, precision in planned.items() if precision != self.base and op not in ran]
        note = f"{len(missing)} that the plan lowers are outside of what is traced: {listed(missing)}"
        found = Coverage.of(program.name, products, planned, self.device_class, [note] if missing else [])
        return found, coverage.is_mostly_lowered(products) and not missing

    def _emulation(self, program: Program) -> str:
        return emulation_note(device_of(program.model)) or "" if self.plan is not None else ""


def _fit(found: Sequence[Sequence[int]], planned: Sequence[Sequence[int]]) -> bool:
    """Return whether a batch has the planned shapes, or fewer samples (the last batch of an epoch)."""
    if len(found) != len(planned):
        return False
    return all(
        len(own) == len(of) and own[0] <= of[0] and list(own[1:]) == list(of[1:])
        for own, of in zip(found, planned, strict=True)
    )


def plan_of(model: torch.nn.Module) -> Plan | None:
    """Return the plan of a model, or of the model in DDP; None without one."""
    wrapping = wrapping_of(wrapped_module(model))
    return wrapping.plan if wrapping is not None else None


def wrapping_of(module: torch.nn.Module) -> Wrapping | None:
    """Return a module's wrapping; None if it is not wrapped."""
    found = getattr(standing_forward(module), "make", None)
    return found if isinstance(found, Wrapping) else None


def check_plan_base(plan: Plan, base: Precision) -> None:
    """Raise MismatchError unless a plan has this base."""
    if base != plan.base:
        raise MismatchError(
            f"the plan has base {plan.base}, not {base}; leave out base, or plan again with it"
        )


def swap_plan(model: torch.nn.Module, plan: Plan, device_class: str) -> None:
    """Switch a wrapped model to another plan from its next call on, without a new trace.

    Raises MismatchError for another model's plan or base, UnsupportedError for a precision that the device
    lacks; the model is then unchanged.
    """
    module = wrapped_module(model)
    forward, before = standing_forward(module), wrapping_of(module)
    assert isinstance(forward, PlannedForward) and before is not None, "the model is not wrapped"
    check_plan_base(plan, before.base)
    fits = before.fits and before.plan is not None and plan.graph_hash == before.plan.graph_hash
    wrapping = replace(Wrapping.of(plan, device_class, before.save_less), speaks=before.speaks, fits=fits)
    wrapping.check(module)
    forward.program().adopt(wrapping(module))
    forward.make = wrapping


def wrapped_module(model: Any) -> torch.nn.Module:
    """Return the module to wrap: the model, or the model inside torch.compile or DDP.

    Raises FormatError for anything but a module, UnsupportedError for DataParallel, flattened parameters and
    TorchScript.
    """
    if not isinstance(model, torch.nn.Module):
        raise FormatError(
            f"model must be a torch.nn.Module, found {shortened(model)}; pass the module itself"
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        return wrapped_module(model._orig_mod)
    if isinstance(model, DistributedDataParallel):
        return wrapped_module(model.module)
    kind = type(model).__name__
    if isinstance(model, DataParallel):
        raise UnsupportedError(NO_DATA_PARALLEL)
    if kind == "FullyShardedDataParallel":
        raise UnsupportedError(
            f"{kind} flattens the parameters; call qsync.wrap on the model first, then apply fully_shard to "
            "its blocks"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(f"{kind} is TorchScript, which cannot be traced; wrap the original module")
    return model

"""Replace a model's forward on the instance, so that it runs through its program.

Class and state_dict keys stay, and copies run under the plan, too. An outer torch.compile or torch.export
traces the lowered graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._higher_order_ops.utils import setup_compilation_env
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper
from torch._subclasses.fake_tensor import FakeTensor

import qsync
from qsync.backend.devices.device_detection import device_of
from qsync.backend.devices.kernel_timing import apart
from qsync.errors import MismatchError, TracingError
from qsync.records.graph import OpGraph
from qsync.runtime.choosers import Chooser
from qsync.runtime.program import Program, not_exported
from qsync.tracing.module_names import name_from_model
from qsync.tracing.replaced_forward import (
    ReplacedForward,
    compile_forward,
    replace_forward,
    restore_forward,
    standing_forward,
    trace_again,
    untraced,
)
from qsync.tracing.tracer import cannot_trace, dynamo_settings, tensor_names, without_autocast

# Attribute that stores the lowered form inside an outer torch.compile's graph.
_LOWERED = "qsync_lowered"
_numbers = itertools.count()
_WHY_UNTRACED = "it runs qsync's kernels; call qsync.unwrap(model) first"
programs: weakref.WeakKeyDictionary[torch.nn.Module, Program] = weakref.WeakKeyDictionary()


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_one_graph() -> bool:
    """Return whether the current torch.compile forbids graph breaks."""
    tracer = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)


class PlannedForward(ReplacedForward):
    """A model's replaced forward, which runs a program.

    `make(model)` creates the program: at once for the model itself, at the first call of a copy (deepcopy,
    pickle), and again after a move to another device.
    """

    def __init__(self, module: torch.nn.Module, make: Callable[[torch.nn.Module], Program]) -> None:
        super().__init__(module)
        self.make = make
        self._compiled: Callable[..., Any] | None = None
        self._kind: type | None = None  # the module's class; fully_shard changes it
        self._set_lowering()

    def _set_lowering(self) -> None:
        """Set the function that lowers graphs in an outer torch.compile, which finds it by name."""

        def lowering(traced: torch.fx.GraphModule) -> Callable[..., Any]:
            lowered: torch.fx.GraphModule = apart(partial(self._lowered, traced))
            return lowered.forward

        self._lowering = lowering
        self._number = str(next(_numbers))  # an outer torch.compile's graph belongs to one plan

    def _lowered(self, traced: torch.fx.GraphModule) -> Any:
        if _LOWERED not in traced.meta:
            values = [node.meta["example_value"] for node in traced.graph.find_nodes(op="placeholder")]
            fake = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
            tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
            names = {id(fake.from_tensor(tensor)): name for name, tensor in tensors}
            name_from_model(traced, names)
            traced.meta[_LOWERED] = self.program().exported(traced, values, names)
        return traced.meta[_LOWERED]

    def program(self) -> Program:
        """Return the program; create it if there is none for the model's device."""
        program = programs.get(self.module)
        if program is not None and program.runs_as_torch:  # whatever its device and sharding
            return program
        if self._kind is not type(self.module):
            self._kind, self._compiled = type(self.module), None
            self.make = getattr(self.make, "for_shards", lambda _: self.make)(self.module)
        if self._compiled is None or program is None or program.device != device_of(self.module):
            program = programs[self.module] = self.make(self.module)
            self._compile(program)
        return program

    def go_on_with(self, program: Program) -> None:
        """Run the program from `make`, reusing the traced graphs of the module's old program."""
        program.adopt(self.make(self.module))
        programs[self.module], self._kind = program, type(self.module)
        self._compile(program)

    def _compile(self, program: Program) -> None:
        self._compiled = compile_forward(self.module, program.compile, dynamic=program.dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model once."""
        if self.instead is not None:
            return self.instead(*args, **kwargs)
        if torch.compiler.is_compiling():
            if not torch.compiler.is_dynamo_compiling():
                return self._export(*args, **kwargs)
            if self._number and _is_one_graph():
                module, own = self.module, self.own

                def plain(*args: Any, **kwargs: Any) -> Any:
                    return own(*args, **kwargs) if own else type(module).forward(module, *args, **kwargs)

                return dynamo_bypassing_wrapper(self._lowering, plain, *args, **kwargs)
        elif torch._C._get_tracing_state() is not None:
            raise not_exported(type(self.module).__name__, "torch.jit cannot trace qsync's kernels")
        return self._call(*args, **kwargs)

    def _export(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under torch.export (non-strict), on fake tensors."""
        program = self.program()

        def lowered(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            names = tensor_names(self.module)
            run: Callable[..., Any] = traced(apart(partial(program.exported, module, inputs, names)), inputs)
            return run

        with dynamo_settings(), without_autocast(program.device), setup_compilation_env() as traced:
            try:
                return compile_forward(self.module, lowered, whole=True)(*args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise error.inner_exception from None
            except torch._dynamo.exc.TorchDynamoException as error:
                raise cannot_trace(self.module, error) from None

    # An outer compile breaks its graph here instead of tracing into it.
    @untraced(_WHY_UNTRACED)
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        program = self.program()
        assert self._compiled is not None
        try:
            return program.call(self._compiled, *args, **kwargs)
        except Exception as error:
            trace_again(self.module)
            if not isinstance(error, TracingError) or not program.drops_gradients_of_other_shapes():
                raise
        return program.call(self._compiled, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        copied = PlannedForward.__new__(PlannedForward)
        memo[id(self)] = copied
        copied.__setstate__({name: deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "own": self.own, "instead": self.instead, "make": self.make}

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("forward",), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {name: state[name] for name in ("module", "own", "instead", "make")}
        self.__dict__.update(own, _compiled=None, _kind=None)
        self._set_lowering()


def take_over(
    model: torch.nn.Module, make: Callable[[torch.nn.Module], Program], traced: Program | None = None
) -> Program:
    """Make a model run the program from `make`, in place.

    If a program has already `traced` the model, its graphs are reused.
    """
    forward = PlannedForward(model, make)
    programs.pop(model, None)
    if traced is not None:
        forward.go_on_with(traced)
    program = forward.program()
    replace_forward(model, forward)
    return program


def attach(
    model: torch.nn.Module,
    choose: Chooser,
    check: Callable[[OpGraph, Collection[str]], None] | None = None,
    **options: Any,
) -> Program:
    """Make `model` run in the precisions that `choose` returns, in place.

    `check` is called with the graph after the first call. `options` are further arguments of `Program`.
    """
    return take_over(model, partial(Program, choose=choose, check=check, **options))


def detach(model: torch.nn.Module) -> None:
    """Make `model` run in plain torch again."""
    programs.pop(model, None)
    restore_forward(model)


def program_of(model: torch.nn.Module) -> Program:
    """Return a wrapped model's program. Raises MismatchError for a model that is not wrapped."""
    if model in programs:
        return programs[model]
    forward = standing_forward(model)  # a copy that was not called yet
    if not isinstance(forward, PlannedForward):
        raise MismatchError(f"this {type(model).__name__} is not wrapped; call qsync.wrap(model, plan) first")
    return forward.program()

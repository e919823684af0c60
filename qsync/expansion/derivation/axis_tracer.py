"""Run a model and trace operator by operator which axes must be equal.

A model on the meta device runs on shapes only. Every tensor has one axis of pieces per dimension
(axis_unification.py). Rules passed by the caller define the effect of each operator. They fill a recorder
(recorder.py). The inputs and outputs of norms are recorded here when a module returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from qsync.errors import TracingError
from qsync.expansion.derivation.axis_unification import (
    Axis,
    FixedReason,
    UnificationError,
    axis,
    fix_axis,
    is_known_fixed,
    leaves,
    size_of,
    unify,
)
from qsync.expansion.derivation.op_rules import Call, Rule, constant, move_rows, pointwise, reduction
from qsync.expansion.derivation.recorder import Frame, Recorder
from qsync.expansion.derivation.trace_records import Event, Norm, Value
from qsync.operators.registry import BY_CALL
from qsync.tracing.held_state import undisturbed
from qsync.tracing.replaced_forward import running_plain
from qsync.tracing.tracer import call_arguments, check_batch

# Operators that mark a module without matrices as a norm: it divides by the root of a mean.
_ROOT_OPS = ("rsqrt", "sqrt", "pow")

RETURNED = FixedReason("the model returns it", True)


class _AxisTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Apply a rule to every operator of a run, and detect modules that are norms."""

    def __init__(self, recorder: Recorder, rules: Mapping[str, Rule]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.rules = rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.recorder.clock += 1
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not outs:
            return out
        call = Call(func, args, kwargs, outs)
        self.recorder.frames[-1].ops.append(call.name)
        name = call.name.removesuffix("_")
        rule = self.rules.get(call.name) or self.rules.get(name)
        is_elementwise = name in BY_CALL and BY_CALL[name].is_elementwise  # torch tags no hardswish_
        if rule is None and (torch.Tag.pointwise in func.tags or is_elementwise):
            rule = pointwise
        elif rule is None and torch.Tag.reduction in func.tags:
            rule = reduction
        elif rule is None and not call.tensors:
            rule = constant
        try:
            if rule is None:
                raise UnificationError
            with _disable_current_modes():  # numbers of rows are real
                found = move_rows(self.recorder, call, rule(self.recorder, call))
            for tensor, value in zip(outs, found, strict=True):
                if [size_of(one) for one in value.axes] != list(tensor.shape):
                    raise UnificationError
        except UnificationError:
            found = self._not_understood(call)
        for tensor, value in zip(outs, found, strict=True):
            self.recorder.values[tensor] = value
        return out

    def _not_understood(self, call: Call) -> list[Value]:
        """Fix all axes of the inputs and outputs of an unknown operator, as nothing is guessed."""
        inputs = [self.recorder.value(tensor) for tensor in call.tensors]
        if all(is_known_fixed(one) for value in inputs for one in value.axes):
            why = FixedReason(f"{call.name} of what does not grow", True)
        else:
            why = FixedReason(f"aten.{call.name}{self.recorder.location()} is not understood", False)
            for value in inputs:
                for one in value.axes:
                    fix_axis(one, why)
        written = any(value.written for value in inputs)
        return [Value([axis(size, [why]) for size in tensor.shape], written=written) for tensor in call.outs]

    def enter(self, module: nn.Module, args: Any) -> None:
        """Start a frame for a module."""
        if module in self.recorder.paths:
            self.recorder.calls[self.recorder.paths[module]] += 1
            self.recorder.frames.append(Frame(self.recorder.paths[module], module))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the frame of a module; record it as a norm if it is one."""
        if module not in self.recorder.paths:
            return
        frame = self.recorder.frames.pop()
        read = _normalised(frame)
        tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if read is None or tensor is None or tensor not in self.recorder.values:
            for kind, axes in frame.normalised:
                frame.events.append(Event("norm", frame.path, kind, axes))
            self.recorder.events += frame.events
            return
        known, value = leaves(read), self.recorder.value(tensor)
        axes = [axis(size_of(one)) if leaves(one) == known else one for one in value.axes]
        written = next((new for new, old in zip(axes, value.axes, strict=True) if new is not old), None)
        if written is None:  # an axis of one element
            return
        for earlier in self.recorder.norms:
            if earlier.path == frame.path:
                unify(earlier.writes, written)
        self.recorder.values[tensor] = replace(value, axes=axes)
        self.recorder.norms.append(
            Norm(self.recorder.clock, frame.path, known, written, _is_centred(frame), value.writer)
        )


def _normalised(frame: Frame) -> Axis | None:
    """Return the one axis that a norm normalizes, None for a module that is no norm.

    A norm has no submodules and no parameters but vectors. It divides one axis by the root of its mean
    square.
    """
    module = frame.module
    if any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters()):
        return None
    if len(frame.normalised) == 1 and len(frame.normalised[0][1]) == 1:
        return frame.normalised[0][1][0]
    vectors = any(True for _ in module.parameters()) or "norm" in type(module).__name__.lower()
    means = [event for event in frame.events if event.op in ("mean", "var", "var_mean")]
    if not vectors or not means or not any(op in _ROOT_OPS for op in frame.ops):
        return None
    return means[0].axes[0] if len(means[0].axes) == 1 else None


def _is_centred(frame: Frame) -> bool:
    """Return whether a norm subtracts the mean."""
    if frame.normalised:
        return frame.normalised[0][0] == "native_layer_norm"
    return any(op.removesuffix("_") in ("sub", "var", "var_mean") for op in frame.ops)


def trace_axes(model: nn.Module, example_inputs: Any, rules: Mapping[str, Rule]) -> Recorder:
    """Run the model once, in evaluation mode and without gradients; it stays unchanged.

    `rules` maps names of operators to their effect on axes.

    Raises:
        TracingError: The model cannot run on these inputs.
    """
    args, kwargs = call_arguments(example_inputs)
    check_batch(args, kwargs)
    on_meta = any(tensor.is_meta for tensor in model.parameters())
    fake = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else nullcontext()
    stand_ins: dict[str, torch.Tensor] = {}
    if isinstance(fake, FakeTensorMode):
        # Fake tensors claim to be on the CPU, like the constants that forward creates.
        with fake:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                stand_ins[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        args, kwargs = tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
    recorder = Recorder(model, stand_ins)
    mode = _AxisTracer(recorder, rules)
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, torch.Tensor):
            recorder.values[tensor] = Value(
                [axis(size, [FixedReason("it is an input's", True)]) for size in tensor.shape]
            )
    try:
        with (
            undisturbed(model),
            torch.no_grad(),
            running_plain(model),
            evaluating(model),
            module_hooks(mode),
            fake,
            mode,
        ):
            output = torch.func.functional_call(model, stand_ins, args, kwargs)
    except Exception as error:
        raise TracingError(_cannot_run(model, error, on_meta)) from error
    for tensor in _returned(output):
        if tensor in recorder.values:
            for one in recorder.value(tensor).axes:
                fix_axis(one, RETURNED)
    recorder.events += recorder.frames[0].events
    return recorder


def _returned(output: Any) -> list[torch.Tensor]:
    """Return the tensors that the model is run for.

    Those of a Hugging Face model are its logits, if it has any: keys and values for generation may grow.
    """
    if hasattr(output, "keys"):
        output = output["logits"] if "logits" in output.keys() else list(output.values())  # noqa: SIM118
    members = list(output) if isinstance(output, (tuple, list)) else [output]
    return [member for member in members if isinstance(member, torch.Tensor)]


def _cannot_run(model: nn.Module, error: Exception, on_meta: bool) -> str:
    """Return the message for a failed run."""
    name, what = type(model).__name__, next(iter(str(error).strip().splitlines()), type(error).__name__)
    if on_meta:
        return (
            f"{name} cannot be run on the meta device, where nothing has values ({what}); build it on a real "
            "device, with few layers if it is large: the table of a recipe is the same"
        )
    return f"{name} cannot be run on these inputs ({what}); pass one real batch, as you would to the model"


@contextmanager
def module_hooks(mode: _AxisTracer) -> Iterator[None]:
    """Call `mode` at the start and end of every module within the context.

    The fused fast path of attention, one operator for a whole layer, is off.
    """
    hooks = torch.nn.modules.module
    fast = torch.backends.mha.get_fastpath_enabled()
    handles = [
        hooks.register_module_forward_pre_hook(mode.enter), hooks.register_module_forward_hook(mode.leave)
    ]  # fmt: skip
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode within the context, then restore each."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training

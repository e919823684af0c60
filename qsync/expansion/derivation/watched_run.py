"""One run of a model, watched operator by operator for which dimensions it ties together.

The model runs as it is, on real values; one on the meta device by its shapes alone. Every tensor gets an axis
of pieces (ties.py) per dimension; what each operator does to them the rules say that are handed in. All of
it, and what the table of a recipe needs besides, goes to a recorder (recorder.py); what a norm read and wrote
is noted here, as its module returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from qsync.errors import TracingError
from qsync.expansion.derivation.axis_unification import (
    Axis,
    Hold,
    Untied,
    axis,
    hold,
    leaves,
    settled,
    size_of,
    unify,
)
from qsync.expansion.derivation.observations import Event, Norm, Value
from qsync.expansion.derivation.op_rules import Call, Rule, constant, pointwise, reduction
from qsync.expansion.derivation.recorder import Frame, Recorder
from qsync.tracing.tracer import call_arguments, check_batch, undisturbed, unwrapped

# What makes a module that owns nothing but vectors a norm: it divides by the root of a mean.
ROOTS = ("rsqrt", "sqrt", "pow")

RETURNED = Hold("the model returns it", True)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator of a run to its rule, and notes which modules are norms."""

    def __init__(self, seen: Recorder, rules: Mapping[str, Rule]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        self.rules = rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.seen.clock += 1
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not outs:
            return out
        call = Call(func, args, kwargs, outs)
        self.seen.frames[-1].ops.append(call.name)
        rule = self.rules.get(call.name) or self.rules.get(call.name.removesuffix("_"))
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = pointwise
        elif rule is None and torch.Tag.reduction in func.tags:
            rule = reduction
        elif rule is None and not call.tensors:
            rule = constant
        try:
            if rule is None:
                raise Untied
            found = rule(self.seen, call)
            for tensor, value in zip(outs, found, strict=True):
                if [size_of(one) for one in value.axes] != list(tensor.shape):
                    raise Untied
        except Untied:
            found = self._not_understood(call)
        for tensor, value in zip(outs, found, strict=True):
            self.seen.values[tensor] = value
        return out

    def _not_understood(self, call: Call) -> list[Value]:
        """No tie is guessed: what enters and leaves such an operator does not grow, unless it was never
        to.
        """
        inputs = [self.seen.value(tensor) for tensor in call.tensors]
        if all(settled(one) for value in inputs for one in value.axes):
            why = Hold(f"{call.name} of what does not grow", True)
        else:
            why = Hold(f"aten.{call.name}{self.seen.place()} is not understood", False)
            for value in inputs:
                for one in value.axes:
                    hold(one, why)
        written = any(value.written for value in inputs)
        return [Value([axis(size, [why]) for size in tensor.shape], written=written) for tensor in call.outs]

    def enter(self, module: nn.Module, args: Any) -> None:
        if module in self.seen.paths:
            self.seen.calls[self.seen.paths[module]] += 1
            self.seen.frames.append(Frame(self.seen.paths[module], module))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self.seen.paths:
            return
        frame = self.seen.frames.pop()
        read = _normalised(frame)
        tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if read is None or tensor is None or tensor not in self.seen.values:
            for kind, axes in frame.normalised:
                frame.events.append(Event("norm", frame.path, kind, axes))
            self.seen.events += frame.events
            return
        known, value = leaves(read), self.seen.value(tensor)
        axes = [axis(size_of(one)) if leaves(one) == known else one for one in value.axes]
        written = next((new for new, old in zip(axes, value.axes, strict=True) if new is not old), None)
        if written is None:  # an axis of one element
            return
        for earlier in self.seen.norms:
            if earlier.path == frame.path:
                unify(earlier.writes, written)
        self.seen.values[tensor] = replace(value, axes=axes)
        self.seen.norms.append(Norm(self.seen.clock, frame.path, known, written, _is_centred(frame)))


def _normalised(frame: Frame) -> Axis | None:
    """The axis that a module divides by the root of its mean square, if it is a norm: it has no modules
    inside, owns nothing but vectors, and does that to one axis.
    """
    module = frame.module
    if any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters()):
        return None
    if len(frame.normalised) == 1 and len(frame.normalised[0][1]) == 1:
        return frame.normalised[0][1][0]
    vectors = any(True for _ in module.parameters()) or "norm" in type(module).__name__.lower()
    means = [event for event in frame.events if event.op in ("mean", "var", "var_mean")]
    if not vectors or not means or not any(op in ROOTS for op in frame.ops):
        return None
    return means[0].axes[0] if len(means[0].axes) == 1 else None


def _is_centred(frame: Frame) -> bool:
    """Whether a norm subtracts the mean."""
    if frame.normalised:
        return frame.normalised[0][0] == "native_layer_norm"
    return any(op.removesuffix("_") in ("sub", "var", "var_mean") for op in frame.ops)


def watch(model: nn.Module, example_inputs: Any, rules: Mapping[str, Rule]) -> Recorder:
    """Run the model once in evaluation mode and without gradients; it is left as it was. `rules` say by an
    operator's name what it does to axes. Raises TracingError when it cannot be run on these inputs.
    """
    args, kwargs = call_arguments(example_inputs)
    check_batch(args, kwargs)
    on_meta = any(tensor.is_meta for tensor in model.parameters())
    fake = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else nullcontext()
    stand_ins: dict[str, torch.Tensor] = {}
    if isinstance(fake, FakeTensorMode):
        # Shapes alone, as on the meta device, but said to be on the CPU, as constants are that forward makes.
        with fake:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                stand_ins[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        args, kwargs = tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
    seen = Recorder(model, stand_ins)
    mode = _Watch(seen, rules)
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, torch.Tensor):
            seen.values[tensor] = Value(
                [axis(size, [Hold("it is an input's", True)]) for size in tensor.shape]
            )
    try:
        with (
            torch.no_grad(),
            undisturbed(model),
            unwrapped(model),
            evaluating(model),
            watched(mode),
            fake,
            mode,
        ):
            output = torch.func.functional_call(model, stand_ins, args, kwargs)
    except Exception as error:
        raise TracingError(_cannot_run(model, error, on_meta)) from error
    for tensor in _returned(output):
        if tensor in seen.values:
            for one in seen.value(tensor).axes:
                hold(one, RETURNED)
    seen.events += seen.frames[0].events
    return seen


def _returned(output: Any) -> list[torch.Tensor]:
    """The tensors that the model is run for. A Hugging Face model's are its logits when it has any: keys and
    values that it hands on for generating may grow.
    """
    if hasattr(output, "keys"):
        output = output["logits"] if "logits" in output.keys() else list(output.values())  # noqa: SIM118
    members = list(output) if isinstance(output, (tuple, list)) else [output]
    return [member for member in members if isinstance(member, torch.Tensor)]


def _cannot_run(model: nn.Module, error: Exception, on_meta: bool) -> str:
    name, what = type(model).__name__, next(iter(str(error).strip().splitlines()), type(error).__name__)
    if on_meta:
        return (
            f"{name} cannot be run on the meta device, where nothing has values ({what}); build it on a real "
            "device, with few layers if it is large: the table of a recipe is the same"
        )
    return f"{name} cannot be run on these inputs ({what}); pass one real batch, as you would to the model"


@contextmanager
def watched(mode: _Watch) -> Iterator[None]:
    """Inside, `mode` is told which module runs; attention's fused fast path, one operator for a whole layer,
    is off.
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
    """Inside, every module evaluates; afterwards each trains or evaluates as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training

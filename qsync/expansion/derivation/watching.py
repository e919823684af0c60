"""One run of a model, watched operator by operator for which dimensions it ties together.

The model runs as it is, on real values; one on the meta device by its shapes alone. Every tensor gets an axis
of pieces (ties.py) per dimension; what each operator does to them is in
rules.py. What the table of a recipe needs besides is noted on the way: which matrix was
multiplied where, what attention read, what a norm read and wrote, and what would not survive copies of
neurons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from qsync.errors import TracingError
from qsync.expansion.derivation.products import ALL_RULES
from qsync.expansion.derivation.rules import Call, constant, pointwise, reduction
from qsync.expansion.derivation.ties import Axis, Hold, Untied, axis, hold, leaves, settled, size_of, unify
from qsync.expansion.derivation.values import Attention, Event, Norm, Use, Value
from qsync.tracing import call_arguments, check_batch, undisturbed, unwrapped

# What makes a module that owns nothing but vectors a norm: it divides by the root of a mean.
ROOTS = ("rsqrt", "sqrt", "pow")

RETURNED = Hold("the model returns it", True)


@dataclass
class Frame:
    """A module's call that has not returned."""

    path: str
    module: nn.Module
    ops: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    normalised: list[tuple[str, list[Axis]]] = field(default_factory=list)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one run showed."""

    def __init__(self, model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.parameters: dict[str, Value] = {}
        self.names: dict[int, str] = {}
        self.buffers = {id(stand_ins.get(name, buffer)): name for name, buffer in model.named_buffers()}
        self.values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.frames: list[Frame] = [Frame("", model)]
        self.uses: list[Use] = []
        self.norms: list[Norm] = []
        self.attentions: list[Attention] = []
        self.events: list[Event] = []
        self.sums: list[str] = []
        self.calls: Counter[str] = Counter()
        self.lookups: dict[str, Axis] = {}
        self.seen: dict[str, int] = {}  # parameters, and when each was first used
        self.clock = 0
        for name, parameter in model.named_parameters():
            self.names[id(parameter)] = name
            axes = [axis(size) for size in parameter.shape]
            self.parameters[name] = Value(axes, param=name)
            self.values[stand_ins.get(name, parameter)] = self.parameters[name]

    @property
    def path(self) -> str:
        return self.frames[-1].path

    # -- what rules ask and say --

    def value(self, tensor: torch.Tensor, held: bool = True) -> Value:
        """What is known of a tensor; one never seen is a buffer or a constant, and what holds varied values
        of one size cannot grow (unless a rule knows better: `held` False)."""
        if tensor not in self.values:
            name = self.buffers.get(id(tensor))
            what = f"the buffer {name}" if name else "a constant"
            why = [Hold(f"it meets {what}{self.place()}", False)] if held else []
            self.values[tensor] = Value([axis(size, why) for size in tensor.shape])
        found: Value = self.values[tensor]
        if found.used is not None:
            self.values[tensor] = replace(found, used=None)  # should it raise: once is enough
            found = self.values[tensor] = found.used()
        if found.param:
            self.seen.setdefault(found.param, self.clock)
        return found

    def place(self) -> str:
        return f" in {self.path}" if self.path else ""

    def looked_up(self, param: str, width: int) -> Axis:
        """The axis of what a table of embeddings hands out. Not its own axis: a head that shares the weight
        multiplies by it a value of another space."""
        return self.lookups.setdefault(param, axis(width))

    def event(self, kind: str, op: str, axes: list[Axis]) -> None:
        axes = [one for one in axes if not settled(one)]
        if axes:
            self.frames[-1].events.append(Event(kind, self.path, op, axes))

    # -- the run --

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.clock += 1
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not outs:
            return out
        call = Call(func, args, kwargs, outs)
        self.frames[-1].ops.append(call.name)
        rule = ALL_RULES.get(call.name) or ALL_RULES.get(call.name.removesuffix("_"))
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = pointwise
        elif rule is None and torch.Tag.reduction in func.tags:
            rule = reduction
        elif rule is None and not call.tensors:
            rule = constant
        try:
            if rule is None:
                raise Untied
            found = rule(self, call)
            for tensor, value in zip(outs, found, strict=True):
                if [size_of(one) for one in value.axes] != list(tensor.shape):
                    raise Untied
        except Untied:
            found = self._not_understood(call)
        for tensor, value in zip(outs, found, strict=True):
            self.values[tensor] = value
        return out

    def _not_understood(self, call: Call) -> list[Value]:
        """No tie is guessed: what enters and leaves such an operator does not grow, unless it was never
        to."""
        inputs = [self.value(tensor) for tensor in call.tensors]
        if all(settled(one) for value in inputs for one in value.axes):
            why = Hold(f"{call.name} of what does not grow", True)
        else:
            why = Hold(f"aten.{call.name}{self.place()} is not understood", False)
            for value in inputs:
                for one in value.axes:
                    hold(one, why)
        written = any(value.written for value in inputs)
        return [Value([axis(size, [why]) for size in tensor.shape], written=written) for tensor in call.outs]

    def enter(self, module: nn.Module, args: Any) -> None:
        if module in self.paths:
            self.calls[self.paths[module]] += 1
            self.frames.append(Frame(self.paths[module], module))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self.paths:
            return
        frame = self.frames.pop()
        read = _normalised(frame)
        tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if read is None or tensor is None or tensor not in self.values:
            for kind, axes in frame.normalised:
                frame.events.append(Event("norm", frame.path, kind, axes))
            self.events += frame.events
            return
        known, value = leaves(read), self.value(tensor)
        axes = [axis(size_of(one)) if leaves(one) == known else one for one in value.axes]
        written = next((new for new, old in zip(axes, value.axes, strict=True) if new is not old), None)
        if written is None:  # an axis of one element
            return
        for earlier in self.norms:
            if earlier.path == frame.path:
                unify(earlier.writes, written)
        self.values[tensor] = replace(value, axes=axes)
        self.norms.append(Norm(self.clock, frame.path, known, written, _is_centred(frame)))


def _normalised(frame: Frame) -> Axis | None:
    """The axis that a module divides by the root of its mean square, if it is a norm: it has no modules
    inside, owns nothing but vectors, and does that to one axis."""
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


def watch(model: nn.Module, example_inputs: Any) -> Watch:
    """Run the model once in evaluation mode and without gradients; it is left as it was. Raises TracingError
    when it cannot be run on these inputs."""
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
    seen = Watch(model, stand_ins)
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
            watched(seen),
            fake,
            seen,
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
    values that it hands on for generating may grow."""
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
def watched(seen: Watch) -> Iterator[None]:
    """Inside, `seen` is told which module runs; attention's fused fast path, one operator for a whole layer,
    is off."""
    hooks = torch.nn.modules.module
    fast = torch.backends.mha.get_fastpath_enabled()
    handles = [
        hooks.register_module_forward_pre_hook(seen.enter), hooks.register_module_forward_hook(seen.leave)
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

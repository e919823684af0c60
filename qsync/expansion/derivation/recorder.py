"""The record of a trace: the axes of every tensor, and the content of a recipe's table.

The rules of operators query it about tensors. They record which matrix was multiplied where, the inputs of
attention, and operators that copies of neurons would not survive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from qsync.expansion.derivation.axis_unification import Axis, FixedReason, axis, is_known_fixed
from qsync.expansion.derivation.trace_records import Attention, Event, Norm, ParameterUse, Value, Writer


def is_without_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape only."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@dataclass
class Frame:
    """A module call that has not returned yet."""

    path: str
    module: nn.Module
    ops: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    normalised: list[tuple[str, list[Axis]]] = field(default_factory=list)


class Recorder:
    """The record of one run: rules read and write it, `Findings` interprets it."""

    def __init__(self, model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.parameters: dict[str, Value] = {}
        self.names: dict[int, str] = {}
        self.buffers = {id(stand_ins.get(name, buffer)): name for name, buffer in model.named_buffers()}
        self.values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.frames: list[Frame] = [Frame("", model)]
        self.uses: list[ParameterUse] = []
        self.norms: list[Norm] = []
        self.attentions: list[Attention] = []
        self.events: list[Event] = []
        self.sums: list[str] = []
        self.calls: Counter[str] = Counter()
        self.embedding_axes: dict[str, Axis] = {}
        self.first_use: dict[str, int] = {}  # parameter -> clock at its first use
        self.clock = 0
        for name, parameter in model.named_parameters():
            self.names[id(parameter)] = name
            axes = [axis(size) for size in parameter.shape]
            number = torch.arange(parameter.shape[0] if parameter.dim() else 1, dtype=torch.float64)
            rows = number.view(-1, *[1] * (parameter.dim() - 1)) if parameter.dim() else number.sum()
            self.parameters[name] = Value(axes, param=name, writer=Writer(name, rows.expand(parameter.shape)))
            self.values[stand_ins.get(name, parameter)] = self.parameters[name]

    @property
    def path(self) -> str:
        """Return the path of the running module."""
        return self.frames[-1].path

    def value(self, tensor: torch.Tensor, held: bool = True) -> Value:
        """Return the recorded Value of a tensor.

        An unseen tensor is a buffer or a constant. Its axes cannot grow, unless a rule handles them (`held`
        False) or the buffer repeats one number.
        """
        if tensor not in self.values:
            name = self.buffers.get(id(tensor))
            what = f"the buffer {name}" if name else "a constant"
            has_values = bool(name) and not is_without_values(tensor) and tensor.numel() > 0
            is_alike = has_values and bool((tensor == tensor.flatten()[0]).all())
            held = held and not is_alike
            why = [FixedReason(f"it meets {what}{self.location()}", False)] if held else []
            self.values[tensor] = Value([axis(size, why) for size in tensor.shape])
        found: Value = self.values[tensor]
        if found.resolve is not None:
            self.values[tensor] = replace(found, resolve=None)  # a second call would raise again
            found = self.values[tensor] = found.resolve()
        if found.param:
            self.first_use.setdefault(found.param, self.clock)
        return found

    def location(self) -> str:
        """Return the running module as a part of a message."""
        return f" in {self.path}" if self.path else ""

    def embedding_axis(self, param: str, width: int) -> Axis:
        """Return the axis of the rows that an embedding returns.

        It differs from the axis of the table: a head that shares the weight multiplies another space by it.
        """
        return self.embedding_axes.setdefault(param, axis(width))

    def event(self, kind: str, op: str, axes: list[Axis]) -> None:
        """Record an event on axes that may grow."""
        axes = [one for one in axes if not is_known_fixed(one)]
        if axes:
            self.frames[-1].events.append(Event(kind, self.path, op, axes))

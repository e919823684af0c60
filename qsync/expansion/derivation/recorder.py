"""What is recorded while a model is watched: every tensor's axes, and what a recipe's table needs besides.

The rules of operators ask it what is known of a tensor, and say here which matrix was multiplied where, what
attention read, and what would not survive copies of neurons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from qsync.expansion.derivation.axis_unification import Axis, Hold, axis, settled
from qsync.expansion.derivation.observations import Attention, Event, Norm, Use, Value


@dataclass
class Frame:
    """A module's call that has not returned."""

    path: str
    module: nn.Module
    ops: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    normalised: list[tuple[str, list[Axis]]] = field(default_factory=list)


class Recorder:
    """Record what one run shows: rules read and write it, `Findings` reads it afterwards."""

    def __init__(self, model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> None:
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

    def value(self, tensor: torch.Tensor, held: bool = True) -> Value:
        """What is known of a tensor; one never seen is a buffer or a constant, and what holds varied values
        of one size cannot grow (unless a rule knows better: `held` False).
        """
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
        multiplies by it a value of another space.
        """
        return self.lookups.setdefault(param, axis(width))

    def event(self, kind: str, op: str, axes: list[Axis]) -> None:
        axes = [one for one in axes if not settled(one)]
        if axes:
            self.frames[-1].events.append(Event(kind, self.path, op, axes))

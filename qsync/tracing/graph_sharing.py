"""One traced graph, several segments: torch.compile shares one graph among equal layers.

If untraceable Python code runs between layers, the tracer traces the first layer and calls its graph with the
parameters of every other layer. Layers may have different precisions, so each layer is a segment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.fx

from qsync.tracing.segments import copy_of

T = TypeVar("T")


class SharedGraph(Generic[T]):
    """A traced graph, and the result of `read` for each set of parameters that the graph runs with.

    `read(module, inputs)` is called at once with the traced inputs, and later with the parameters of other
    layers. `names` returns the present id -> name of the model's tensors; parameter names identify a layer.
    A call with parameters outside the model gets the first result.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        names: Callable[[], dict[int, str]],
        read: Callable[[torch.fx.GraphModule, list[Any]], T],
    ) -> None:
        self._names, self._read = names, read
        self._places = [place for place, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
        # After compilation, the tracer removes the example values from its own graph.
        self._traced = copy_of(module) if self._places else module
        self._first = read(module, list(inputs))
        self._of_names = {self._names_of(inputs): self._first}
        self._note(inputs)

    def of(self, inputs: Sequence[Any]) -> T:
        """Return the result of `read` for the parameters among the inputs of a call."""
        pairs = zip(self._last, self._parameters(inputs), strict=True)
        if len(self._of_names) == 1 and all(last() is parameter for last, parameter in pairs):
            return self._first
        names = self._names_of(inputs)
        if None in names:
            return self._first
        if names not in self._of_names:
            self._of_names[names] = self._read(self._traced, self._inputs_with_parameters_of(inputs))
        self._note(inputs)
        return self._of_names[names]

    def _note(self, inputs: Sequence[Any]) -> None:
        """Store weak references to the parameters of a call."""
        self._last = [weakref.ref(parameter) for parameter in self._parameters(inputs)]

    def _parameters(self, inputs: Sequence[Any]) -> list[torch.nn.Parameter]:
        return [inputs[place] for place in self._places]

    def _names_of(self, inputs: Sequence[Any]) -> tuple[str | None, ...]:
        names = self._names()
        return tuple(names.get(id(parameter)) for parameter in self._parameters(inputs))

    def _inputs_with_parameters_of(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the traced example inputs, with the model's tensors of this call (shapes may differ)."""
        own = self._names()
        placeholders = self._traced.graph.find_nodes(op="placeholder")
        return [
            value if id(value) in own else placeholder.meta.get("example_value")
            for value, placeholder in zip(inputs, placeholders, strict=True)
        ]

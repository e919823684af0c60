"""Hooks on gradients: on all parameters until the order of a backward is known, then on a few of them.

A hook costs a microsecond or two of the thread that trains, once per parameter and pass. The first gradient
of a backward, the last, and some between them say as much of where a rank stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_NUM_KEPT = 8  # of a backward's gradients
_NUM_STEPS = 2  # in which all are seen: the first may take another way


class GradientHooks:
    """Call `then` at gradients of `parameters`. The owner says when a backward or a step has ended."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], then: Callable[[], None]) -> None:
        self._parameters, self._then = parameters, then
        self._hooks: list[Any] = []
        self.see_all()

    def __len__(self) -> int:
        return len(self._hooks)

    def see_all(self) -> None:
        """Watch all parameters: at first, and where the watched ones get no gradient any more."""
        if len(self._hooks) < len(self._parameters):
            self._watch(range(len(self._parameters)))
        self._orders: list[list[int]] = []
        self._arrived: list[int] = []
        self._num_steps = 0

    def remove(self) -> None:
        """Call `then` no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def backward_ended(self) -> None:
        """Note the order in which the gradients of this backward came."""
        if self._num_steps < _NUM_STEPS:
            self._orders.append(self._arrived)
            self._arrived = []

    def step_ended(self) -> None:
        """Watch a few gradients of every backward that was seen, once enough steps were."""
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS:
            self._watch({number for order in self._orders for number in _spread(order)})
            self._orders = []

    def _watch(self, numbers: Iterable[int]) -> None:
        self.remove()
        trained = (number for number in sorted(numbers) if self._parameters[number].requires_grad)
        self._hooks = [self._hook(number) for number in trained]

    def _hook(self, number: int) -> Any:
        def arrived(_: torch.Tensor) -> None:
            if self._num_steps < _NUM_STEPS:
                self._arrived.append(number)
            self._then()

        return self._parameters[number].register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


def _spread(order: Sequence[int]) -> set[int]:
    """Return the first and the last of an order, and some between them."""
    if len(order) <= _NUM_KEPT:
        return set(order)
    return {order[round(k * (len(order) - 1) / (_NUM_KEPT - 1))] for k in range(_NUM_KEPT)}

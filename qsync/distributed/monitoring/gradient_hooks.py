"""Hook the gradients of all parameters until their order is known, then only a few of them.

A hook costs the training thread one or two microseconds per parameter and pass. The first, the last and a few
gradients between them show a rank's progress as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_NUM_KEPT = 8  # watched gradients per backward
_NUM_STEPS = 2  # steps in which all are watched: the first one may differ


class GradientHooks:
    """Call `then` at gradients of `parameters`. The owner reports the end of backward and step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], then: Callable[[], None]) -> None:
        self._parameters, self._then = parameters, then
        self._hooks: list[Any] = []
        self.see_all()

    def __len__(self) -> int:
        return len(self._hooks)

    def see_all(self) -> None:
        """Watch all parameters: at the start, and when the watched ones get no more gradients."""
        if len(self._hooks) < len(self._parameters):
            self._watch(range(len(self._parameters)))
        self._orders: list[list[int]] = []
        self._arrived: list[int] = []
        self._num_steps = 0

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def backward_ended(self) -> None:
        """Record the order of this backward's gradients."""
        if self._num_steps < _NUM_STEPS:
            self._orders.append(self._arrived)
            self._arrived = []

    def step_ended(self) -> None:
        """After enough steps, watch only a few gradients of every recorded backward."""
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
    """Return the first and the last item, and a few between them."""
    if len(order) <= _NUM_KEPT:
        return set(order)
    return {order[round(k * (len(order) - 1) / (_NUM_KEPT - 1))] for k in range(_NUM_KEPT)}

"""Capture and restore a card's training state: weights, optimizer, other states, random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qsync.backend.devices.device_detection import device_of
from qsync.errors import MismatchError, shortened

Hyperparameters = list[dict[str, Any]]  # of each parameter group of the optimizer


class TrainingState:
    """This card's training state: objects with `state_dict`, including "model" and "optimizer"."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = states
        self._optimizer: torch.optim.Optimizer = states["optimizer"]
        self._device = device_of(states["model"])

    def whole(self) -> dict[str, Any]:
        """Return the complete state, for a card that is behind."""
        state: dict[str, Any] = {name: one.state_dict() for name, one in self._states.items()}
        state["random"] = torch.get_rng_state()
        if self._device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def without_weights(self) -> dict[str, Any]:
        """Return the states of all objects but the model."""
        return {name: one.state_dict() for name, one in self._states.items() if name != "model"}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the given states. Raises MismatchError for a state that does not fit its object."""
        for name, one in self._states.items():
            try:
                if name in state:
                    one.load_state_dict(state[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise MismatchError(
                    f"the job's {name} does not fit this card's ({shortened(error, 200)}); start this card "
                    "with the same objects as the others"
                ) from error

    def heal(self, state: Mapping[str, Any], before: Hyperparameters) -> None:
        """Load another card's complete state from the start of the step.

        Hyperparameters that the loop has set since then stay. `before` is the result of `marked` at the
        start.
        """
        own = self.hyperparameters()
        self.load(state)
        for group, then, now in zip(self._optimizer.param_groups, before, own, strict=True):
            group.update({name: value for name, value in now.items() if _was_set(value, then.get(name))})
        torch.set_rng_state(state["random"].cpu())
        if self._device.type == "cuda" and "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self._device)

    def marked(self) -> Hyperparameters:
        """Return the hyperparameters, each number as a unique object, to detect later assignments."""
        for group in self._optimizer.param_groups:
            group.update({name: float(repr(value)) for name, value in group.items() if type(value) is float})
        return self.hyperparameters()

    def hyperparameters(self) -> Hyperparameters:
        """Return the optimizer's current hyperparameters."""
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rates of all groups that have one."""
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group)

    def free(self) -> None:
        """Free gradients and optimizer states."""
        self._optimizer.state.clear()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _was_set(value: object, before: object) -> bool:
    """Return whether a hyperparameter was set since it was marked, even to an equal value."""
    return value is not before if type(value) is float else value != before

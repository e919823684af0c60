"""What a card needs to train on where another stands: weights, optimizer, other states, random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qsync.backend.devices.device_detection import device_of
from qsync.errors import MismatchError, shortened

Hyperparameters = list[dict[str, Any]]  # of each group of the optimizer


class TrainingState:
    """The training state of this card: objects with `state_dict`, "model" and "optimizer" among them."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = states
        self._optimizer: torch.optim.Optimizer = states["optimizer"]
        self._device = device_of(states["model"])

    def whole(self) -> dict[str, Any]:
        """Return the whole state, for a card that is behind."""
        state: dict[str, Any] = {name: one.state_dict() for name, one in self._states.items()}
        state["random"] = torch.get_rng_state()
        if self._device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def without_weights(self) -> dict[str, Any]:
        """Return the states of all objects but the model."""
        return {name: one.state_dict() for name, one in self._states.items() if name != "model"}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the states that are there. Raises MismatchError for a state that does not fit its object."""
        for name, one in self._states.items():
            try:
                if name in state:
                    one.load_state_dict(state[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise MismatchError(
                    f"the job's {name} does not fit this card's ({shortened(error, 200)}); start this card "
                    "with the same"
                ) from error

    def heal(self, state: Mapping[str, Any], before: Hyperparameters) -> None:
        """Load the whole state of another card, as it was when the step began.

        Hyperparameters that the loop has set since, by the step's number, stay. `before` is what `marked`
        returned when the step began.
        """
        own = self.hyperparameters()
        self.load(state)
        for group, then, now in zip(self._optimizer.param_groups, before, own, strict=True):
            group.update({name: value for name, value in now.items() if _was_set(value, then.get(name))})
        torch.set_rng_state(state["random"].cpu())
        if self._device.type == "cuda" and "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self._device)

    def marked(self) -> Hyperparameters:
        """Return the hyperparameters, each number an object that no equal one set later is."""
        for group in self._optimizer.param_groups:
            group.update({name: float(repr(value)) for name, value in group.items() if type(value) is float})
        return self.hyperparameters()

    def hyperparameters(self) -> Hyperparameters:
        """Return the present hyperparameters of the optimizer."""
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rate of each group that has one."""
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group)

    def free(self) -> None:
        """Free the gradients, and what the optimizer keeps."""
        self._optimizer.state.clear()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _was_set(value: object, before: object) -> bool:
    """Return whether a hyperparameter was set since it was marked, be it to the value that it had."""
    return value is not before if type(value) is float else value != before

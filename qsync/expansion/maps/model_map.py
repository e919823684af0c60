"""The map of a whole model: every tensor's map and what no tensor holds, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qsync.errors import MismatchError
from qsync.expansion.maps.depth import Depth
from qsync.expansion.maps.tensor_maps import TensorMap
from qsync.expansion.recipe.recipes import Recipe
from qsync.expansion.recipe.sizes import joined


@dataclass(frozen=True, slots=True, eq=False)
class ModelMap:
    """How a model grows: the map of every tensor, by name, and what no tensor holds.

    `eps` are those of norms that change, by their path in the grown model. `small` and `sizes` are the sizes
    before and after.
    """

    recipe: Recipe
    tensors: Mapping[str, TensorMap]
    eps: Mapping[str, float]
    small: Mapping[str, int]
    sizes: Mapping[str, int]
    depth: Depth
    split: str = "random"
    new_blocks: str = "zero"
    seed: int = 0

    def grown(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict of the small model, grown: its weights, or a moving average of them, which gets the
        same random part. Differentiable. Raises MismatchError for another model's.

        >>> average = plan.grown(ema.state_dict())
        """
        missing = [m.source for m in self.tensors.values() if m.source not in state]
        if missing:
            raise MismatchError(
                f"the state to grow lacks {joined(missing)}; give that of the model that was planned for"
            )
        for m in self.tensors.values():
            if tuple(state[m.source].shape) != m.source_shape:
                raise MismatchError(
                    f"{m.source} has shape {tuple(state[m.source].shape)}, and {m.source_shape} in the model "
                    "that was planned for; give that model's state"
                )
        return {name: m.grown(state[m.source], self.seed) for name, m in self.tensors.items()}

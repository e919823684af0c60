"""The map of a whole model: the maps of all tensors, and the eps of norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import MismatchError
from qsync.expansion.maps.depth import Depth
from qsync.expansion.maps.tensor_maps import TensorMap
from qsync.expansion.recipe.recipe import Recipe, check_unwrapped
from qsync.expansion.recipe.sizes import first_few
from qsync.records.json_files import check_kind


@dataclass(frozen=True, slots=True, eq=False)
class ModelMap:
    """How a model grows.

    `tensors` holds the map of every grown tensor by name. `eps` holds the new eps of norms whose eps changes,
    by path in the grown model. `small` and `sizes` are the sizes before and after.
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

    @property
    def build_sizes(self) -> dict[str, Any]:
        """Return the sizes after growth as a recipe's `build` takes them, with the blocks' sources."""
        return self._with_sources(self.sizes, self.depth.sources)

    @property
    def small_build_sizes(self) -> dict[str, Any]:
        """Return the sizes before growth as a recipe's `build` takes them; every block is its own source."""
        return self._with_sources(self.small, [tuple(range(num)) for num in self.depth.num_before])

    def _with_sources(self, sizes: Mapping[str, int], sources: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        if not self.depth.num_layers:
            return dict(sizes)
        return {**sizes, "sources": sources[0] if len(set(sources)) == 1 else tuple(sources)}

    def grown(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Grow a state dict of the small model: its weights, or a moving average of them.

        Both get the same random part. The result is differentiable with respect to `state`.

        Args:
            state: Tensors of the small model's shapes, by name.

        Returns:
            The grown tensors by name.

        Raises:
            MismatchError: The state belongs to another model.
            FormatError: The state is not a mapping of tensors.

        Example:
            >>> average = plan.grown(ema.state_dict())
        """
        check_kind(state, Mapping, "state", "model.state_dict()")
        missing = [m.source for m in self.tensors.values() if m.source not in state]
        if missing:
            raise MismatchError(
                f"the state to grow lacks {first_few(missing)}; give the state of the planned model"
            )
        for m in self.tensors.values():
            check_kind(state[m.source], torch.Tensor, m.source, "model.state_dict()")
            if tuple(state[m.source].shape) != m.source_shape:
                raise MismatchError(
                    f"{m.source} has shape {tuple(state[m.source].shape)}, but {m.source_shape} in the "
                    "planned model; give the planned model's state"
                )
        return {name: m.grown(state[m.source], self.seed) for name, m in self.tensors.items()}

    def check_small(self, model: torch.nn.Module) -> None:
        """Raise MismatchError unless a model has the tensors of the planned small model."""
        wanted = {m.source: m.source_shape for m in self.tensors.values()}
        _check_tensors(model, wanted, "the small model", "give the model that was planned for")

    def check_grown(self, big: torch.nn.Module) -> None:
        """Raise MismatchError unless a model has the tensors of the grown model."""
        wanted = {name: m.shape for name, m in self.tensors.items()}
        _check_tensors(big, wanted, "the grown model", "give what plan.expand(model) returned")


def _check_tensors(
    model: torch.nn.Module, wanted: Mapping[str, tuple[int, ...]], which: str, instead: str
) -> None:
    """Raise MismatchError unless a model has the wanted tensors, and no parameters beside them."""
    check_unwrapped(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {**dict(model.named_buffers(remove_duplicate=False)), **parameters}
    for name in (*wanted, *parameters):
        shape = tuple(found[name].shape) if name in found else None
        if shape != wanted.get(name):
            has = f"{name} of shape {shape}" if shape is not None else f"no {name}"
            planned = f"shape {wanted[name]}" if name in wanted else "no such parameter"
            raise MismatchError(f"{which} has {has}, but the expansion plan has {planned}; {instead}")

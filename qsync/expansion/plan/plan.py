"""The plan of an expansion: the map of a model, which prints itself and makes the grown model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsync.expansion.apply.grow import grow
from qsync.expansion.maps.format import table
from qsync.expansion.maps.model_map import ModelMap


@dataclass(frozen=True, slots=True, eq=False)
class ExpansionPlan(ModelMap):
    """How a model grows: the map of every tensor, by name, and what no tensor holds.

    `eps` are those of norms that change, by their path in the grown model. `small` and `sizes` are the sizes
    before and after. `str()` is a table.
    """

    def expand(self, model: torch.nn.Module) -> torch.nn.Module:
        """The grown model: what `qsync.expand` returns, by this plan."""
        return grow(model, self)

    def __str__(self) -> str:
        return table(self)

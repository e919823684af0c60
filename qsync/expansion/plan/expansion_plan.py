"""The plan of an expansion: a model map that prints itself and builds the grown model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsync.expansion.apply.grow import grow
from qsync.expansion.maps.describe import table
from qsync.expansion.maps.model_map import ModelMap


@dataclass(frozen=True, slots=True, eq=False)
class ExpansionPlan(ModelMap):
    """How a model grows; `str()` formats a table. See `ModelMap` for the fields."""

    def expand(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the grown model of this plan, as `qsync.expand` does.

        Raises:
            MismatchError: `model` is not the planned model.
        """
        return grow(model, self)

    def __str__(self) -> str:
        return table(self)

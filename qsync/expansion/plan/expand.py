"""expand: plan a growth and carry it out."""

from __future__ import annotations

import torch

from qsync.expansion.plan.planner import plan_expansion
from qsync.expansion.recipe.recipes import Recipe


def expand(
    model: torch.nn.Module, recipe: Recipe, split: str = "random", depth: str = "zero", seed: int = 0
) -> torch.nn.Module:
    """A larger model of the same class that computes the same function, and whose copies part when it trains.

    LEMON's method (arXiv:2310.07999), for any widths, up to twice the depth, both at once; see
    `plan_expansion` for `split`, `depth`, `seed` and what is raised. The new model has the type, the device
    and the mode of `model`, which is left as it is; so is torch's random state. Where the eps of norms
    change, the modules and, where it can say so, the config have the new ones: a state dict alone would not
    be the same model (see `save_expanded`).

    >>> big = qsync.expand(small, qsync.recipe_of(small).to(width=768, layers=12))
    >>> assert qsync.verify_expansion(small, big, batch).passed
    """
    return plan_expansion(model, recipe, split=split, depth=depth, seed=seed).expand(model)

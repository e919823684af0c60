"""Plan an expansion and build the grown model."""

from __future__ import annotations

import torch

from qsync.expansion.plan.planner import plan_expansion
from qsync.expansion.recipe.recipe import Recipe


def expand(
    model: torch.nn.Module, recipe: Recipe, split: str = "random", depth: str = "zero", seed: int = 0
) -> torch.nn.Module:
    """Return a larger model of the same class that computes the same function.

    The copies in it become different as it trains. The method is LEMON's (arXiv:2310.07999): any width, up to
    twice the depth, or both. The eps of norms may change. The modules and, where possible, the config hold
    the new eps. A state dict alone does not: use `save_expanded`.

    Args:
        model: The trained model. It stays unchanged, and so does torch's random state.
        recipe: The recipe with target sizes (`Recipe.to`).
        split: How copies share the weights of their readers: "random", "scalar" or "even"; see
            `plan_expansion`.
        depth: How new blocks are initialized: "zero" or "cancel"; see `plan_expansion`.
        seed: The seed of all random parts.

    Returns:
        The grown model, in the type, on the device and in the mode of `model`.

    Raises:
        UnsupportedError: The sizes or modules have no lossless expansion.
        MismatchError: Model and recipe contradict each other.
        FormatError: An option or the recipe is malformed.

    Example:
        >>> big = qsync.expand(small, qsync.recipe_of(small).to(width=768, layers=12))
        >>> assert qsync.verify_expansion(small, big, batch).passed
    """
    return plan_expansion(model, recipe, split=split, depth=depth, seed=seed).expand(model)

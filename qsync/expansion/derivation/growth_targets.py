"""Derive a recipe whose target is a larger model: another configuration, or another call of a builder."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from qsync.errors import QSyncError, UnsupportedError, shortened
from qsync.expansion.derivation.derive import derive_recipe
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.plan.experts import plan_experts
from qsync.expansion.plan.planner import plan_expansion, sizes_of
from qsync.expansion.recipe.recipe import Recipe, Sizes

_CHANGE = re.compile(r"(\+?\d+|\d*\.?\d+x)(,(\+?\d+|\d*\.?\d+x))*")


def derive_growth(
    model: nn.Module, example_inputs: Any, build: Callable[[bool, Sizes], nn.Module], **options: Any
) -> Recipe:
    """Derive a recipe, and set its target to the sizes of a larger model of the same class.

    Nothing has to be known of how the class derives its sizes: `build` makes both models, as a user would,
    and the recipe reads their sizes off their shapes.

    Args:
        model: The trained model.
        example_inputs: One batch: a tensor, a tuple (positional) or a dict (keywords).
        build: `build(is_grown, sizes)` returns a new model, as large as the grown or as `model` itself.
            `sizes["sources"]` has the number of the block that each one copies; it is missing where only the
            shapes of the larger model are read.
        **options: Fields of `Recipe` that replace the derived ones.

    Returns:
        The recipe with its target. `qsync.expand` grows by it, and verifies on `example_inputs`.

    Raises:
        TracingError: The model cannot run on the inputs.
        UnsupportedError: The table is incomplete (`derive_recipe` shows it), or the sizes do not fit it.

    Example:
        >>> def build(is_grown, sizes):
        ...     return timm.create_model("deit_tiny_patch16_224", embed_dim=288 if is_grown else 192)
        >>> big = qsync.expand(model, qsync.derive_growth(model, images, build))
    """
    own: dict[str, Any] = {}

    def built(_: nn.Module, sizes: Sizes) -> nn.Module:
        return build(any(sizes[name] != size for name, size in own.items()), sizes)

    recipe = derive_recipe(model, example_inputs).recipe(built, **options)
    own |= sizes_of(model, recipe)
    with torch.random.fork_rng():
        large = build(True, {})
    wanted = sizes_of(large, recipe)
    if wanted == own:
        raise UnsupportedError(
            f"what changes in the larger {type(model).__name__} are not sizes that grow without loss (they "
            f"are {', '.join(own)}); change those"
        )
    return recipe.to(**wanted)


def plan_config_growth(
    model: Any, example_inputs: Any, fields: Mapping[str, str], **options: Any
) -> ExpansionPlan:
    """Plan the growth of a model of transformers to a configuration with other fields.

    Args:
        model: The trained model, with a `config`.
        example_inputs: One batch.
        fields: Changes by the name of a field, with dots for a configuration within another: a size ("768"),
            a factor ("1.5x") or a sum ("+4"). Of a list each number is changed, or a list of as many given.
        **options: `split`, `depth` and `seed` of `plan_expansion`.

    Returns:
        The plan. A number of experts grows by `plan_experts`, all else by `plan_expansion`.

    Raises:
        QSyncError: A field does not exist, is no size, or its change is not understood.
        UnsupportedError: The class cannot have these sizes, or the growth is not lossless.

    Example:
        >>> plan = plan_config_growth(model, batch, {"intermediate_size": "1.5x", "num_hidden_layers": "+2"})
    """
    large = copy.deepcopy(model.config)
    for name, change in fields.items():
        _change(large, name, change)

    def build(is_grown: bool, sizes: Sizes) -> nn.Module:
        return type(model)(with_sources(model.config, large if is_grown else model.config, sizes))  # type: ignore[no-any-return]

    eps = [name for name in vars(model.config) if name.endswith(("_eps", "_epsilon"))]
    try:
        if all("experts" in name for name in fields):
            recipe = derive_recipe(model, example_inputs).recipe(lambda _, sizes: build(True, sizes))
            return plan_experts(model, recipe, lambda is_grown: build(is_grown, {}), seed=options["seed"])
        recipe = derive_growth(model, example_inputs, build, eps=eps[0] if len(eps) == 1 else "")
        return plan_expansion(model, recipe, **options)
    except QSyncError:
        raise
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot have {', '.join(f'{k}={v}' for k, v in fields.items())} "
            f"({shortened(error)}); change the fields that depend on these too, as heads with the width"
        ) from error


def with_sources(small: Any, config: Any, sizes: Sizes) -> Any:
    """Return a copy of a configuration in which every block has the kind of the one that it copies.

    Without `sources` among the sizes the kinds of `small` are repeated as often as there are layers.
    """
    made, sources = copy.deepcopy(config), sizes.get("sources", ())
    for name, kinds in vars(small).items():
        if name.endswith("_types") and isinstance(kinds, list) and kinds:
            is_known = bool(sources) and all(isinstance(number, int) for number in sources)
            order = sources if is_known else range(getattr(made, "num_hidden_layers", len(kinds)))
            setattr(made, name, [kinds[number % len(kinds)] for number in order])
    return made


def _change(config: Any, field: str, change: str) -> None:
    """Change one field of a nested configuration."""
    *above, last = field.split(".")
    for name in above:
        config = getattr(config, name, None)
    before = getattr(config, last, None)
    numbers = before if isinstance(before, (list, tuple)) else [before]
    if not all(type(number) is int for number in numbers):
        raise QSyncError(
            f"the config has no size {shortened(field)} (found {shortened(before)}); see config.json"
        )
    changes = change.split(",") if isinstance(change, str) and _CHANGE.fullmatch(change) else []
    if len(changes) not in (1, len(numbers)):
        raise QSyncError(
            f"{field} cannot become {shortened(change)}; give a number (768), a factor (1.5x) or a sum (+4), "
            f"or {len(numbers)} of them"
        )
    found = [
        _changed(number, one, field)
        for number, one in zip(numbers, changes * len(numbers) if len(changes) == 1 else changes, strict=True)
    ]
    setattr(config, last, type(before)(found) if isinstance(before, (list, tuple)) else found[0])


def _changed(number: int, change: str, field: str) -> int:
    """Apply one change to a number."""
    if not change.endswith("x"):
        return number + int(change) if change.startswith("+") else int(change)
    found = number * float(change[:-1])
    if found != round(found):
        raise QSyncError(
            f"{change[:-1]} times {field} {number} is not whole; give another factor, or the number"
        )
    return round(found)

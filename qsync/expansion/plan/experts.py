"""Grow a mixture of experts in their number: copies that share what the router gives their source.

Every expert and its row of the router get m copies. Copies have equal scores, so that m times as many choices
are all copies of those chosen before. A softmax, before or after the choice, and any weights that are divided
by their sum, give each copy 1 / m of its source's weight, and the outputs of the copies sum to the source's.
A weight of each expert by itself (a sigmoid) stays whole: the copies' last matrix is divided by m. This
matrix differs between copies by noise that sums to zero, so that they part in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qsync.errors import MismatchError, UnsupportedError
from qsync.expansion.apply.grow import TOLERANCE_FP32, grow
from qsync.expansion.apply.verification import verify_expansion
from qsync.expansion.maps.depth import Depth
from qsync.expansion.maps.space_growth import circular
from qsync.expansion.maps.tensor_maps import Axis, TensorMap
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.recipe.recipe import Recipe


def plan_experts(
    model: nn.Module, recipe: Recipe, build: Callable[[bool], nn.Module], *, seed: int = 0
) -> ExpansionPlan:
    """Plan the growth of a mixture of experts to a multiple of their number.

    The grown model is built and compared with `model`, since no table shows how a router weighs its choice.

    Args:
        model: The trained model.
        recipe: Its recipe, with inputs to compare on (`derive_recipe`).
        build: `build(is_grown)` returns a new model. The grown one has m times as many experts, of which m
            times as many are chosen, and is otherwise like `model`.
        seed: The seed of the noise.

    Returns:
        The plan; `plan.expand(model)` builds the grown model.

    Raises:
        UnsupportedError: The number is no multiple, or the router's choice is not kept.
        MismatchError: `build` returns a model that differs in more than the number of experts.

    Example:
        >>> plan = plan_experts(model, qsync.derive_recipe(model, batch).recipe(None), lambda grown: ...)
    """
    with torch.random.fork_rng():
        shapes = {name: value.shape for name, value in _tensors(build(True)).items()}
    small = _tensors(model)
    times = {_times(name, value.shape, shapes.get(name)) for name, value in small.items()} - {1}
    num = next(iter(times), None)
    if num is None or len(times) > 1 or shapes.keys() != small.keys():
        raise UnsupportedError(
            f"the experts of {type(model).__name__} grow only in whole copies of all of them, and alone; "
            "give a multiple of their number, and change other sizes in a second step"
        )
    for share in (1.0, 1.0 / num):
        maps = {name: _map(name, value, shapes[name], share, recipe) for name, value in small.items()}
        made = replace(recipe, build=lambda _, sizes: build(sizes["experts"] > 1), target={})
        plan = ExpansionPlan(made, maps, {}, {"experts": 1}, {"experts": num}, Depth({}), seed=seed)
        big = grow(model, replace(plan, recipe=replace(made, inputs=None)))
        is_fp32 = {value.dtype for value in model.parameters()} == {torch.float32}
        if verify_expansion(model, big, recipe.inputs, TOLERANCE_FP32 if is_fp32 else None).passed:
            return plan
    raise UnsupportedError(
        f"the router of {type(model).__name__} would not keep its choice: with {num} copies of every expert "
        f"it must choose {num} times as many, from all of them and not by group; grow the number of choices "
        "(num_experts_per_tok) by the same factor, or keep the number of experts"
    )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and saved buffers (a router's correction of its scores) by name."""
    return {**model.state_dict(keep_vars=True), **dict(model.named_parameters(remove_duplicate=False))}


def _times(name: str, before: torch.Size, after: torch.Size | None) -> int | None:
    """Return how many times as many experts a parameter has, 1 without experts; None for another change."""
    if after is None or len(before) != len(after):
        raise MismatchError(
            f"`build` returns a model without {name}; change nothing but the number of experts"
        )
    changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
    if not changed:
        return 1
    whole = changed == [0] and after[0] > before[0] and after[0] % before[0] == 0
    return after[0] // before[0] if whole else None


def _map(name: str, value: torch.Tensor, shape: torch.Size, share: float, recipe: Recipe) -> TensorMap:
    """Return the map of one parameter: experts are copied along dimension 0.

    The last matrix of an expert, and its bias, write to the residual stream; the weights of copies sum there.
    """
    axes: list[Any] = [None] * value.ndim
    made = TensorMap(name, name, tuple(value.shape), tuple(axes))
    if shape == value.shape:
        return made
    growth, line = circular(value.shape[0], shape[0]), recipe.line_of(name)
    is_last = line is not None and {*line.writes} & {*recipe.residual} != set()
    is_read = is_last and value.ndim > 2
    shares = torch.full((shape[0],), share, dtype=torch.float64)
    axes[0] = Axis("experts", growth, shares, is_read=is_read, is_exact=False)
    noise = float(value.detach().double().std()) if is_read else 0.0
    factor = share if is_last and not is_read else 1.0
    return replace(made, axes=tuple(axes), noise=noise, factor=factor)

"""expand: a new model of the same class, larger, that computes what the small one does."""

from __future__ import annotations

from typing import Any

import torch

from qsync.errors import MismatchError
from qsync.expansion import norms
from qsync.expansion.layout import ExpansionPlan, plan_expansion
from qsync.expansion.recipes import Recipe
from qsync.expansion.sizes import joined


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
    return grow(model, plan_expansion(model, recipe, split=split, depth=depth, seed=seed))


def grow(model: torch.nn.Module, plan: ExpansionPlan) -> torch.nn.Module:
    """What `expand` does, by a plan that is there already: `plan_expansion` shows it, this makes it."""
    with torch.random.fork_rng():
        new = plan.recipe.build(model, plan.sizes)
    if type(new) is not type(model):
        raise MismatchError(
            f"the recipe {plan.recipe.name} builds a {type(new).__name__} for a {type(model).__name__}; let "
            "`build` return one of the same class"
        )
    _check_shapes(plan, new)
    with torch.no_grad():
        state = plan.grown({**model.state_dict(), **dict(model.named_parameters(remove_duplicate=False))})
    _fill(model, new, plan, state)
    set_eps(new, plan)
    modes = {path: module.training for path, module in model.named_modules()}
    for path, module in new.named_modules():
        module.training = modes.get(path, model.training)
    return new


def _check_shapes(plan: ExpansionPlan, new: torch.nn.Module) -> None:
    """MismatchError unless what was built has the shapes that were planned."""
    shapes = {name: tuple(value.shape) for name, value in new.named_parameters(remove_duplicate=False)}
    missing = sorted(shapes.keys() - plan.tensors.keys())
    if missing:
        raise MismatchError(
            f"the larger {type(new).__name__} has {joined(missing)}, which nothing of the small one becomes; "
            f"let `build` of the recipe {plan.recipe.name} make a model with the blocks that were asked for"
        )
    buffers = {name: tuple(value.shape) for name, value in new.named_buffers(remove_duplicate=False)}
    for name, m in plan.tensors.items():
        found = shapes.get(name, buffers.get(name))
        if found != m.shape:
            has = f"has {name} of shape {found}" if found is not None else f"has no {name}"
            raise MismatchError(
                f"the larger {type(new).__name__} {has}, and the recipe {plan.recipe.name} grows it to "
                f"{m.shape} with {', '.join(f'{k} {v}' for k, v in plan.sizes.items())}; give the sizes that "
                "its `build` takes, or all of them"
            )


def _fill(
    model: torch.nn.Module, new: torch.nn.Module, plan: ExpansionPlan, state: dict[str, torch.Tensor]
) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in new.named_parameters():
        source = parameters[plan.tensors[name].source]
        value.data = state[name]
        value.requires_grad_(source.requires_grad)
    before = dict(model.named_buffers())
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    for name, buffer in new.named_buffers():
        if name in state:
            buffer.data = state[name]
        elif name in before and before[name].shape == buffer.shape:
            buffer.data = before[name].detach().clone()
        else:
            buffer.data = buffer.data.to(device)


def set_eps(new: torch.nn.Module, plan: ExpansionPlan) -> None:
    """The eps that norms now have: on the modules, and in the config where all are alike."""
    for path, eps in plan.eps.items():
        module = new.get_submodule(path)
        setattr(module, norms.eps_name(module) or "eps", eps)
    config: Any = getattr(new, "config", None)
    if plan.recipe.eps and len(set(plan.eps.values())) == 1 and hasattr(config, plan.recipe.eps):
        setattr(config, plan.recipe.eps, next(iter(plan.eps.values())))

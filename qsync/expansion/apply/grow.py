"""Build the grown model by a model map."""

from __future__ import annotations

from typing import Any

import torch

from qsync.errors import MismatchError, UnsupportedError, shortened
from qsync.expansion.apply.edits import carry_edits, warn_of_hooks
from qsync.expansion.apply.verification import verify_expansion
from qsync.expansion.maps.model_map import ModelMap
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.recipe import Sizes
from qsync.expansion.recipe.sizes import first_few

# Relative. On some hundred models the rounding of split weights stays below 3e-7.
TOLERANCE_FP32 = 2e-6


def grow(model: torch.nn.Module, plan: ModelMap) -> torch.nn.Module:
    """Return the grown model of a map; the implementation of `expand`."""
    plan.check_small(model)
    if any(value.is_meta for value in model.parameters()):
        raise UnsupportedError(
            f"the weights of this {type(model).__name__} are on the meta device, without values; load them "
            "first"
        )
    new = build_grown(model, plan)
    _check_shared(model, plan, new)
    with torch.no_grad():
        state = plan.grown({**model.state_dict(), **dict(model.named_parameters(remove_duplicate=False))})
    _fill(model, new, plan, state)
    set_norm_eps(model, new, plan)
    modes = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in new.named_modules():
        module.training = modes.get(plan.depth.source_of(path), model.training)
    warn_of_hooks(model)
    if plan.recipe.inputs is not None:
        _verify(model, new, plan)
    return new


def _verify(model: torch.nn.Module, new: torch.nn.Module, plan: ModelMap) -> None:
    """Raise UnsupportedError if the grown model differs: a table does not show constants of the width."""
    is_fp32 = {p.dtype for p in model.parameters()} == {torch.float32}
    found = verify_expansion(model, new, plan.recipe.inputs, tolerance=TOLERANCE_FP32 if is_fp32 else None)
    if not found.passed:
        raise UnsupportedError(
            f"the grown {type(model).__name__} would not compute what the small one does (difference "
            f"{found.max_difference:.1e}), so its code uses a size that grows, as in a scale by the width; "
            "grow other sizes, or make that number an argument that keeps its value"
        )


def build_grown(model: torch.nn.Module, plan: ModelMap) -> torch.nn.Module:
    """Build the larger model by the recipe, with its own initial weights and the small model's edits.

    Raises:
        MismatchError: The recipe's `build` fails, or returns another class, other shapes or shared
            parameters.
        UnsupportedError: An edited attribute depends on the sizes that grow.
    """
    new = _built(model, plan, plan.build_sizes)
    if type(new) is not type(model):
        raise MismatchError(
            f"the recipe {plan.recipe.name} builds a {type(new).__name__} for a {type(model).__name__}; let "
            "`build` return one of the same class"
        )
    if {id(value) for value in new.parameters()} & {id(value) for value in model.parameters()}:
        raise MismatchError(
            f"`build` of the recipe {plan.recipe.name} returns parameters of the small model itself; let it "
            "make new ones"
        )
    _check_shapes(plan, new)
    carry_edits(model, _built(model, plan, plan.small_build_sizes), new, plan)
    return new


def _built(model: torch.nn.Module, plan: ModelMap, sizes: Sizes) -> torch.nn.Module:
    """Return the recipe's model with these sizes, without changing torch's random state."""
    cards = {value.device.index for value in model.parameters() if value.is_cuda}
    try:
        with torch.random.fork_rng(sorted(card for card in cards if card is not None)):
            return plan.recipe.build(model, sizes)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise MismatchError(
            f"`build` of the recipe {plan.recipe.name} fails with {_sizes_text(sizes)} "
            f"({type(error).__name__}: {shortened(error)}); correct it, or ask for sizes that its class "
            "can have"
        ) from error


def _sizes_text(sizes: Sizes) -> str:
    """Format the sizes of a model."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _check_shared(model: torch.nn.Module, plan: ModelMap, new: torch.nn.Module) -> None:
    """Raise MismatchError unless both models share the same parameters."""
    before = dict(model.named_parameters(remove_duplicate=False))
    sources: dict[int, int] = {}  # parameter of either model -> its counterpart
    for name, value in new.named_parameters(remove_duplicate=False):
        source = before[plan.tensors[name].source]
        is_copied = plan.depth.block_of(plan.tensors[name].source) != ""
        if sources.setdefault(id(value), id(source)) != id(source) or (
            not is_copied and sources.setdefault(id(source), id(value)) != id(value)
        ):
            raise MismatchError(
                f"{name} is tied to another weight in only one of the two models; make `build` of the "
                f"recipe {plan.recipe.name} tie the same weights as the small {type(model).__name__}"
            )


def _check_shapes(plan: ModelMap, new: torch.nn.Module) -> None:
    """Raise MismatchError unless the shapes of the built model are those of the map."""
    shapes = {name: tuple(value.shape) for name, value in new.named_parameters(remove_duplicate=False)}
    missing = sorted(shapes.keys() - plan.tensors.keys())
    if missing:
        raise MismatchError(
            f"the larger {type(new).__name__} has {first_few(missing)}, which has no counterpart in the "
            f"small one; make `build` of the recipe {plan.recipe.name} create only the requested blocks"
        )
    buffers = {name: tuple(value.shape) for name, value in new.named_buffers(remove_duplicate=False)}
    for name, m in plan.tensors.items():
        found = shapes.get(name, buffers.get(name))
        if found != m.shape:
            has = f"has {name} of shape {found}" if found is not None else f"has no {name}"
            raise MismatchError(
                f"the larger {type(new).__name__} {has}, but the recipe {plan.recipe.name} grows it to "
                f"{m.shape} with {_sizes_text(plan.sizes)}; give sizes that its `build` accepts, or correct "
                f"the line `{plan.recipe.line_of(m.source)}`"
            )


def _fill(
    model: torch.nn.Module, new: torch.nn.Module, plan: ModelMap, state: dict[str, torch.Tensor]
) -> None:
    """Write parameters and buffers to the new model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in new.named_parameters():
        value.data = state[name]
        value.requires_grad_(parameters[plan.tensors[name].source].requires_grad)
    before, saved_names = dict(model.named_buffers()), model.state_dict().keys()
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    for name, buffer in new.named_buffers():
        source = before.get(plan.depth.source_of(name))
        if name in state:
            buffer.data = state[name]
        elif source is not None and source.shape == buffer.shape:
            buffer.data = source.detach().clone()
        elif plan.depth.source_of(name) in saved_names:
            raise MismatchError(
                f"{name} is a buffer that would grow, but the recipe {plan.recipe.name} has no line for it; "
                "add a line with the spaces that it reads and writes"
            )
        else:
            buffer.data = buffer.data.to(device)


def set_norm_eps(model: torch.nn.Module, new: torch.nn.Module, plan: ModelMap) -> None:
    """Set the eps of all norms, and that of the config where all norms have the same.

    Norms that growth does not affect get the small model's eps. It may differ from the result of `build`,
    because the small model may itself be a grown one.
    """
    before = dict(model.named_modules())
    for path, module in new.named_modules():
        source, name = before.get(plan.depth.source_of(path)), module_kinds.eps_name(module)
        if name and type(source) is type(module):
            setattr(module, name, getattr(source, name))
    for path, eps in plan.eps.items():
        module = new.get_submodule(path)
        setattr(module, module_kinds.eps_name(module) or "eps", eps)
    config: Any = getattr(new, "config", None)
    if plan.recipe.eps and len(set(plan.eps.values())) == 1 and hasattr(config, plan.recipe.eps):
        setattr(config, plan.recipe.eps, next(iter(plan.eps.values())))

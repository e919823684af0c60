"""Carry over edits of the small model that neither its config nor its recipe's `build` states."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from qsync.errors import UnsupportedError, shortened
from qsync.expansion.maps.model_map import ModelMap
from qsync.expansion.recipe import module_kinds

logger = logging.getLogger("qsync")

# The mode is copied separately. Activation recomputation changes no value, and needs a function beside it.
_SET_ELSEWHERE = {"training", "gradient_checkpointing"}
_ADDED_ANEW = ("transformers.", "qsync.")
_MISSING = object()


def carry_edits(model: torch.nn.Module, fresh: torch.nn.Module, new: torch.nn.Module, plan: ModelMap) -> None:
    """Give the grown model the replaced modules and the edited attributes of the small model.

    An edit is a difference between the small model and `fresh`, which the recipe builds with the same sizes.
    Nothing is carried over where `build` does not return the small model's shapes.

    Raises:
        UnsupportedError: An edited attribute depends on the sizes that grow, or a module with parameters was
            replaced by one of another class that is no norm of the same kind.
    """
    if _shapes(fresh) != _shapes(model):
        return
    before, built = (dict(one.named_modules(remove_duplicate=False)) for one in (model, fresh))
    for path, module in list(new.named_modules(remove_duplicate=False)):
        source = plan.depth.source_of(path)
        own, unedited = before.get(source), built.get(source)
        if own is None or unedited is None or _layout(unedited) != _layout(module):
            continue
        if _layout(own) == _layout(unedited):
            _carry_attributes(own, unedited, module, source)
        elif _is_empty(own):
            new.set_submodule(path, copy.deepcopy(own))
        elif not _are_norms(own, unedited, source):
            raise UnsupportedError(
                f"{source} is a {type(own).__name__}, but `build` of the recipe {plan.recipe.name} creates "
                f"a {type(unedited).__name__}; make `build` create the same class"
            )


def warn_of_hooks(model: torch.nn.Module) -> None:
    """Log a warning if a module has forward hooks, which growing does not carry over."""
    for path, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Transformers and qsync add their own hooks to the grown model, too.
        if any(not str(getattr(hook, "__module__", "")).startswith(_ADDED_ANEW) for hook in hooks):
            logger.warning(
                "qsync: %s has forward hooks, which the grown model does not get; register them there",
                path or type(model).__name__,
            )
            return


def _shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of all parameters by name."""
    return {name: value.shape for name, value in model.named_parameters(remove_duplicate=False)}


def _layout(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return a module's class, and its children's names if it has no parameters."""
    return type(module), tuple(module._modules) if _is_empty(module) else ()


def _is_empty(module: torch.nn.Module) -> bool:
    """Return whether a module has no parameters."""
    return next(module.parameters(), None) is None


def _are_norms(own: torch.nn.Module, unedited: torch.nn.Module, path: str) -> bool:
    """Return whether two modules are norms of the same kind."""
    kind = module_kinds.norm_kind(own, path)
    return kind is not None and kind == module_kinds.norm_kind(unedited, path)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, None or a tuple of these."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, (bool, int, float, str, type(None))) for part in parts)


def _carry_attributes(
    own: torch.nn.Module, unedited: torch.nn.Module, module: torch.nn.Module, path: str
) -> None:
    """Set the edited attributes of one module of the grown model."""
    for name, value in vars(own).items():
        is_set_elsewhere = name in _SET_ELSEWHERE or name == module_kinds.eps_name(own)
        if name.startswith("_") or is_set_elsewhere or not _is_plain(value):
            continue
        fresh, grown = (getattr(one, name, _MISSING) for one in (unedited, module))
        # Compared as text, because NaN equals NaN there.
        if not _is_plain(fresh) or repr(value) == repr(fresh):
            continue
        if repr(grown) != repr(fresh):
            raise UnsupportedError(
                f"{path or type(own).__name__}.{name} is {shortened(value)}, but `build` sets it to "
                f"{shortened(fresh)}, and to {shortened(grown)} in the grown model; set it in the model's "
                "config or class, or grow another size"
            )
        setattr(module, name, value)

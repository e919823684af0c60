"""Modules that keep only what enters them, and compute forward once more in backward (torch's checkpoint)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qsync.errors import MismatchError

# What was checkpointed here, to be undone when another plan comes.
_checkpointed: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]] = weakref.WeakKeyDictionary()


def recompute(model: torch.nn.Module, paths: Sequence[str]) -> None:
    """Make these modules of a model, and no others made so before, compute forward twice in training.

    In place, with the same class and state_dict. Raises MismatchError for a module that the model does not
    have, before anything is changed.

    >>> recompute(model, ["layers.0", "layers.1"])
    """
    modules = dict(model.named_modules())
    for path in paths:
        if path not in modules:
            raise MismatchError(
                f"the plan recomputes {path!r}, which {type(model).__name__} does not have; plan again for "
                "this model"
            )
    for module in _checkpointed.pop(model, []):
        module.__dict__.pop("forward", None)
    chosen = [modules[path] for path in paths]
    for module in chosen:
        module.forward = partial(_twice, module)  # type: ignore[method-assign]
    if chosen:
        _checkpointed[model] = chosen


def _twice(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(module).forward, module)
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

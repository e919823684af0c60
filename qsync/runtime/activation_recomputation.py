"""Activation recomputation: modules save only their inputs and compute forward again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qsync.errors import MismatchError, shortened


def recompute(model: torch.nn.Module, paths: Sequence[str]) -> None:
    """Make exactly these modules of a model compute forward again in backward (torch's checkpoint).

    The change is in place, with the same class and state_dict, and for training alone. Raises MismatchError
    for a module that the model does not have, before anything is changed.

    >>> recompute(model, ["layers.0", "layers.1"])
    """
    modules = dict(model.named_modules())
    for path in paths:
        if path not in modules:
            raise MismatchError(
                f"the plan recomputes {shortened(path)}, which {type(model).__name__} does not have; "
                "plan again for this model"
            )
    for module in modules.values():
        forward = module.__dict__.get("forward")
        if isinstance(forward, partial) and forward.func is _twice:
            del module.__dict__["forward"]
            if forward.args[1] is not None:
                module.forward = forward.args[1]
    for path in paths:
        # A hook or an adapter, or qsync.wrap on a part, may have given this one module a forward of its own.
        modules[path].forward = partial(_twice, modules[path], modules[path].__dict__.get("forward"))


def _twice(module: torch.nn.Module, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    forward = own or partial(type(module).forward, module)
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

"""Activation recomputation: modules save only their inputs and recompute forward in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import qsync
from qsync.errors import MismatchError, shortened


def recompute(model: torch.nn.Module, paths: Sequence[str]) -> None:
    """Make these modules recompute forward in backward (torch's checkpoint), and no others.

    Works in place, keeps class and state_dict, and affects only training. Raises MismatchError for an unknown
    module, before any change.

    >>> recompute(model, ["layers.0", "layers.1"])
    """
    modules = dict(model.named_modules())
    for path in paths:
        if path not in modules:
            raise MismatchError(
                f"the plan recomputes {shortened(path)}, which {type(model).__name__} lacks; plan again for "
                "this model"
            )
    for module in modules.values():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Recomputed):
            del module.__dict__["forward"]
            if forward.own is not None:
                module.forward = forward.own
    for path in paths:
        # A hook, an adapter, or qsync.wrap on a part may have replaced this module's forward.
        modules[path].forward = Recomputed(modules[path], modules[path].__dict__.get("forward"))


class Recomputed:
    """A forward that backward recomputes. `own`: the module's previous instance forward, if any."""

    def __init__(self, module: torch.nn.Module, own: Callable[..., Any] | None) -> None:
        self.module, self.own = module, own

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward once, and in training again during backward."""
        forward = self.own or partial(type(self.module).forward, self.module)
        if not (self.module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("recomputed",), {"module": self.module, "own": self.own}

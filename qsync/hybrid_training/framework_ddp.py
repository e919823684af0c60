"""Find the DDP that a framework puts around a planned model, at its first training call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qsync.distributed.data_parallel import note_ddp
from qsync.distributed.monitoring.step_phases import CallHook

logger = logging.getLogger("qsync")


class FirstCall:
    """A hook that calls `then(called, model)` once, at a planned model's first call with gradients.

    `called` is the DDP through which the model is called, or the model itself. Outside of DDP and FSDP2 it
    logs a warning: gradients are then averaged only if the loop does so.
    """

    def __init__(
        self, model: torch.nn.Module, then: Callable[[torch.nn.Module, torch.nn.Module], None]
    ) -> None:
        self._model, self._then = model, then
        self._hook = CallHook(model, self._call)

    def _call(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._hook.remove()
        outer: Any = DistributedDataParallel._active_ddp_module
        if outer is not None:
            note_ddp(self._model, outer)
        elif not any(isinstance(p, DTensor) for p in self._model.parameters()):
            logger.warning(
                "qsync: %s was planned with ddp=False and is called outside of DistributedDataParallel and "
                "FSDP2: its gradients are averaged only if the training loop averages them",
                type(self._model).__name__,
            )
        self._then(outer if outer is not None else self._model, self._model)

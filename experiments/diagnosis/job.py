"""The training job for planted faults, and the parts that a fault may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from qsync.runtime.wrapping import wrapped_module

_VOCAB = 256


def nothing() -> None:
    """Do nothing."""


@dataclass
class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Random tokens: batches of `size` rows of `length` tokens and one more."""

    size: int
    length: int
    before: Callable[[], object] = nothing

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.before()
        generator = torch.Generator().manual_seed(index)
        return torch.randint(_VOCAB, (self.size, self.length + 1), generator=generator)


@dataclass
class Training:
    """A job's changeable state: `between` runs after every optimizer step, `rows.before` before a batch."""

    rank: int
    rows: Rows
    model: torch.nn.Module  # the model in DDP
    optimizer: torch.optim.Optimizer
    between: Callable[[], object] = nothing
    step_s: float = 0.0  # predicted seconds
    first_core: int = 0
    held: list[Any] = field(default_factory=list)  # objects that a fault keeps alive

    @property
    def trained(self) -> torch.nn.Module:
        """Return the model inside DDP."""
        return wrapped_module(self.model)

    def step(self, batch: torch.Tensor) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.between()


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

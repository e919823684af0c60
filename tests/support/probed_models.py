"""Small models whose sensitivity tests compute by hand, each with a batch, and their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def linear() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16)), torch.randn(8, 32)


def mixed() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.second(F.gelu(self.first(x)))
            return torch.matmul(y, y.mT)

    return Mixed(), torch.randn(2, 8, 16)

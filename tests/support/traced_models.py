"""Small models that tests trace: one with any body, one with checkpoints, one whose graph breaks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Applied(nn.Module):
    """A linear layer, then whatever a test wants to see captured, then another."""

    def __init__(self, body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("buffer", torch.zeros(8))
        self.body = [body]  # in a list, so that it is no part of the module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.body[0](self, self.fc1(x))).square().mean()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Checkpointed(nn.Module):
    def __init__(self, num_layers: int = 3, enabled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(num_layers)
        )
        self.enabled = enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.enabled else layer(x)
        return x.square().mean()


class Broken(nn.Module):
    """Layers that break in their middle: torch.compile makes one graph for layers that are alike."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu()
            torch._dynamo.graph_break()
            return self.b(y)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

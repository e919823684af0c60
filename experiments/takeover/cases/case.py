"""Cases: users' operations on a model, as functions of a model maker that return numbers.

`make(model)` wraps a model in one precision, or leaves it plain. A case returns the user-visible tensors:
outputs, or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync.experiments.harness.cases import Cases

# Users' models have any class, so cases are not typed.
Maker = Callable[[Any], Any]
Outcome = Any  # a tensor, or a list of tensors


CASES = Cases()
case = CASES.case


def cases(group: str, given: Mapping[str, Callable[[Maker], Outcome]]) -> None:
    """Register cases that work, by name."""
    for name, do in given.items():
        case(group, name)(do)


class Block(nn.Module):
    """A transformer's residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus its correction."""
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks and a head, over sequences of any length."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(width), Block(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return scaled logits."""
        return self.head(self.second(self.first(x))) * scale  # type: ignore[no-any-return]


class Counting(Net):
    """A model that counts its calls and scales the first ones down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return logits; the first calls are scaled down."""
        self.calls += 1
        return super().forward(x, scale) * min(1.0, self.calls / 100)


class Experts(Net):
    """A mixture of experts as a loop over data-dependent token counts, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU()) for _ in range(2))
        self.back = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the logits of every token's expert."""
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (gates.argmax(-1) == number).nonzero()[:, 0]
            if len(chosen):
                out[chosen] = self.back(expert(tokens[chosen])) * gates[chosen, number : number + 1]
        return self.head(out.view(x.shape)) * scale  # type: ignore[no-any-return]


def net(kind: type[Net] = Net, seed: int = 0) -> Any:
    """Return the model, equal at every call."""
    torch.manual_seed(seed)
    return kind()


def data(length: int = 6) -> torch.Tensor:
    """Return a batch of sequences."""
    return torch.randn(4, length, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: Any, loss: torch.Tensor | None = None) -> Any:
    """Return the gradients of one backward pass."""
    model.zero_grad()
    (model(data()).square().mean() if loss is None else loss).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def called(make: Maker, model: Any = None) -> Any:
    """Return a model after its first call and backward."""
    made = make(net() if model is None else model)
    made(data()).sum().backward()
    made.zero_grad()
    return made

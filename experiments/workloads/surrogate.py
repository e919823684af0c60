"""Fit small nets to noiseless functions: losses fall until limited by arithmetic.

Held-out losses keep falling with the training loss, because the functions have no noise. So the effect of
rounding shows in the final loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync.experiments.workloads.workload import Batch, Workload, seeded

_SIZE = 256  # samples per rank


class FunctionNet(nn.Module):
    """Layers of equal width with GELU, from (n, `inputs`) to (n, `outputs`)."""

    def __init__(self, inputs: int, outputs: int, width: int, num_layers: int) -> None:
        super().__init__()
        widths = [inputs, *[width] * num_layers]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the fitted function's value at x."""
        y: Tensor = self.head(self.layers(x))
        return y


class ResidualNet(nn.Module):
    """Residual layers with LayerNorm, from (n, `inputs`) to (n, `outputs`)."""

    def __init__(self, inputs: int, outputs: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(num_layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the fitted function's value at x."""
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(x)
        return y


def friedman(x: Tensor) -> Tensor:
    """Return Friedman's first function of x (n, 10), standardized (n, 1); scikit-learn's make_friedman1."""
    first, second, third, fourth, fifth = x.unbind(1)[:5]
    y = 10 * torch.sin(math.pi * first * second) + 20 * (third - 0.5) ** 2 + 10 * fourth + 5 * fifth
    return ((y - 14.4) / 4.8).unsqueeze(1)


def impedance(x: Tensor) -> Tensor:
    """Return the impedance of a circuit of x (n, 4), standardized (n, 1); scikit-learn's make_friedman2.

    The parts of x in [0, 1] stand for a resistance of 0 to 100, an angular frequency of 40 pi to 560 pi, an
    inductance of 0 to 1, and a capacitance of 1 to 11.
    """
    resistance, frequency = 100 * x[:, 0], math.pi * (40 + 520 * x[:, 1])
    reactance = frequency * x[:, 2] - 1 / (frequency * (1 + 10 * x[:, 3]))
    return ((torch.hypot(resistance, reactance) - 474.0) / 379.0).unsqueeze(1)


def friedman_workload() -> Workload:
    """Return a workload that fits GELU layers to Friedman's function."""
    make = lambda: FunctionNet(10, 1, 384, 3)  # noqa: E731
    return _fitted("friedman", make, friedman, 10, "net with GELU; Friedman's first function")


def impedance_workload() -> Workload:
    """Return a workload that fits residual LayerNorm layers to a circuit's impedance."""
    make = lambda: ResidualNet(4, 1, 256, 2)  # noqa: E731
    return _fitted("impedance", make, impedance, 4, "residual net with LayerNorm; impedance of a circuit")


def _fitted(
    name: str,
    make: Callable[[], nn.Module],
    function: Callable[[Tensor], Tensor],
    inputs: int,
    description: str,
) -> Workload:
    """Return a workload that fits a net to a function of [0, 1]^inputs; samples never repeat."""

    def drawn(*key: int) -> Batch:
        draw = np.random.default_rng(key)
        x = torch.from_numpy(draw.random((_SIZE, inputs), dtype=np.float32))
        return 2 * x - 1, function(x)

    return Workload(
        name, lambda seed: seeded(make, seed), drawn, F.mse_loss,
        lambda num: [drawn(number) for number in range(num)], 32, 2e-3,
        f"{description}, {_SIZE} samples, drawn anew",
    )  # fmt: skip

"""Measure a node's overhead with a model of tiny operators, whose step is Python and autograd.

Operators run in the requested precision, although FP32 would be faster at this size.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

import qsync
from qsync.experiments.kernels.cases import Bar, Bench, Case, Run

_WIDTH = 16
EAGER, AUTOCAST, MODES = "eager", "autocast", ("fp32", "bf16")
BARS = (
    Bar("fp32", EAGER, 1.1, at_most=True),
    Bar("bf16", AUTOCAST, 1.4, at_most=True),
)


class Block(nn.Module):
    """Four operators."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.act = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the activated, normalized product."""
        activated: Tensor = self.act(self.norm(self.fc(x)))
        return x + activated


def host_case(bench: Bench, bars: tuple[Bar, ...] = BARS, blocks: int = 100) -> Case:
    """Compare forward and backward in FP32 eager, in torch.autocast and in qsync's precisions."""
    torch.manual_seed(bench.seed)
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(bench.device)
    x = torch.randn(2, _WIDTH, device=bench.device)

    def step(model: nn.Module, autocast: bool = False) -> Run:
        def run() -> None:
            model.zero_grad()
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=autocast):
                loss = model(x).sum()
            loss.backward()

        return run

    case = Case("host", f"{4 * blocks} operators of 2 x {_WIDTH}", EAGER, bars)
    case.add(EAGER, lambda: step(copy.deepcopy(model)))
    case.add(AUTOCAST, lambda: step(copy.deepcopy(model), True))
    for mode in MODES:
        case.add(mode, partial(lambda mode: step(qsync.wrap(copy.deepcopy(model), mode, strict=True)), mode))
    return case

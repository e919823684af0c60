"""Gradients lie as their parameters do, as DDP's buckets want them, whatever order images lie in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qsync
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan


class Filters(nn.Module):
    """Convolutions whose weights have dimensions of size 1, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 1, stride=2, bias=False)
        self.to_one, self.from_one = nn.Conv2d(32, 1, 3), nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.from_one(self.to_one(self.narrow(self.first(x).relu()))).mean((2, 3))


@pytest.mark.parametrize(
    "precisions", [("bf16", "fp32"), ("int8", "fp32"), ("fp16", "fp16"), ("bf16", "int8")]
)
def test_a_gradient_has_its_parameter_s_strides(precisions):
    model, x = Filters(), torch.randn(4, 3, 16, 16)
    graph = qsync.capture(model, x)
    assignment = {op.name: Precision(precisions[k % 2]) for k, op in enumerate(graph.adjustable)}
    qsync.wrap(model, Plan(graph.model, graph.hash, {"weak": ClassPlan(assignment)}))
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name

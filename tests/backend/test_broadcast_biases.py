"""Linear layers whose bias is no vector: `F.linear` broadcasts any shape to that of its result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], activated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(64, 32) / 6), nn.Parameter(torch.randn(shape))
        self.activated = activated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y) if self.activated else y


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float(((found - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize(
    ("precision", "activated"),
    [("fp32", False), ("bf16", False), ("int8", False), ("int8", True), ("int8_all", True)],
)
@pytest.mark.parametrize(
    ("rows", "shape"),
    [((8,), (8, 64)), ((8,), (1, 64)), ((8,), (8, 1)), ((8,), (1,)),
     ((3, 5), (5, 64)), ((3, 5), (3, 1, 64)), ((3, 5), (3, 5, 64)), ((3, 5), (1,))],
)  # fmt: skip
def test_every_shape_that_torch_takes(rows, shape, precision, activated):
    x = torch.randn(*rows, 32, generator=torch.Generator().manual_seed(1))
    plain, model = Net(shape, activated), qsync.wrap(Net(shape, activated), precision, strict=True)
    expected, found = plain(x), model(x)
    for result in (expected, found):
        result.square().sum().backward()
    assert apart(found, expected) < 0.01
    assert apart(model.weight.grad, plain.weight.grad) < 0.02
    assert apart(model.bias.grad, plain.bias.grad) < 0.01

"""Weights that a model reads first without gradients, as in consistency losses, train all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync


class Consistent(nn.Module):
    """The loss of a model against its own result, which it computes first, in `without`."""

    def __init__(self, without) -> None:
        super().__init__()
        self.without, self.up, self.down = without, nn.Linear(32, 64), nn.Linear(64, 8)
        self.image = nn.Conv2d(2, 8, 3)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) + self.image(x.view(-1, 2, 4, 4)).mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.without():
            target = self.part(x)
        return (self.part(x) - target.clone() * 0.5).square().mean()


def gradients(without, wrap=lambda model: model) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Consistent(without)
    x = torch.randn(16, 32, requires_grad=without is torch.no_grad)
    wrap(model)(x).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_all_gradients_are_those_of_the_plain_model(precision, without):
    plain = gradients(without)
    found = gradients(without, lambda model: qsync.wrap(model, precision, strict=True))
    for got, expected in zip(found, plain, strict=True):
        if expected is None:  # an input in inference mode is no part of what trains
            assert got is None
        elif precision == "fp32":
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        else:
            assert (got - expected).norm() < 0.1 * expected.norm()


def test_an_outer_compile_has_all_gradients_too():
    plain = gradients(torch.no_grad)
    found = gradients(
        torch.no_grad,
        lambda model: torch.compile(qsync.wrap(model, "bf16"), fullgraph=True, backend="aot_eager"),
    )
    for got, expected in zip(found, plain, strict=True):
        assert (got - expected).norm() < 0.1 * expected.norm()

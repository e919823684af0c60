"""Gradients of gradients: kernels refuse them at once, so that none is left out in silence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync.errors import UnsupportedError
from qsync.runtime.planned_forward import program_of


def linear(precision: str) -> nn.Module:
    torch.manual_seed(0)
    return qsync.wrap(nn.Sequential(nn.Linear(32, 16)), precision, strict=True)


def batch() -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_penalty_on_the_gradient_of_a_sum_is_refused():
    model, x = linear("int8"), batch()
    y = model(x)
    with pytest.raises(UnsupportedError, match="cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_products_in_fp32_have_second_derivatives():
    found = []
    for model in (linear("fp32"), qsync.unwrap(linear("fp32"))):
        x = batch()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(model[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("many", ["batched", "jacobian"])
def test_many_gradients_at_once_are_refused_in_one_sentence(many):
    model, x = linear("int8"), batch()
    with pytest.raises(UnsupportedError, match="leave out is_grads_batched or vectorize"):
        if many == "batched":
            torch.autograd.grad(model(x).mean(0), x, torch.eye(16), is_grads_batched=True)
        else:
            torch.autograd.functional.jacobian(model, x, vectorize=True)


class Forces(nn.Module):
    """An energy, and the forces that its gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.energy = nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(F.gelu(self.up(x))).sum(), x, create_graph=self.training)
        return forces


def test_what_a_forward_differentiates_is_no_part_of_the_model():
    torch.manual_seed(0)
    plain = Forces()
    expected = plain(batch())
    model = qsync.wrap(plain, "int8", strict=True).eval()
    assert (model(batch()) - expected).norm() < 0.05 * expected.norm()
    assert set(program_of(model).assignment()) == {"up", "energy"}
    with pytest.raises(UnsupportedError, match="cannot be differentiated twice"):
        model.train()(batch())

"""Products whose sizes coincide, whose operands are one value, or whose arguments have names, beside FP32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync

W = 8
PRECISIONS = ["bf16", "int8", "int8_all"]


class Model(nn.Module):
    """A product of what a linear layer of 8 features made, and of a weight."""

    def __init__(self, product: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.weight, self.product = nn.Linear(W, W), nn.Parameter(torch.randn(W, W)), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.weight, self.first(x))


PRODUCTS = {
    "one value as bias and operand": lambda w, x: torch.addmm(x, x, w),
    "one value as both operands": lambda w, x: torch.addmm(w[0], x, x),
    "one weight as bias and operand": lambda w, x: torch.addmm(w, x, w),
    "a vector as input and bias": lambda w, x: F.linear(x[0], w, x[0]),
    "a square product": lambda w, x: (x @ w.relu()) @ x.mT.contiguous(),
    "mm by keywords": lambda w, x: torch.mm(input=x, mat2=w),
    "bmm by a keyword": lambda w, x: torch.bmm(x[None], mat2=w[None]),
    "no features": lambda w, x: F.linear(x[:, :0], w[:, :0], x[0]) + x,
    "no results": lambda w, x: torch.cat([x, F.linear(x, w[:0])], 1),
    "keys and values of other heads": lambda w, x: F.scaled_dot_product_attention(
        x.expand(1, 4, W, W), (x @ w).expand(1, 2, W, W), x.view(1, 1, W, W) * 1.5, enable_gqa=True
    ),
}


def agree(model: nn.Module, x: torch.Tensor, precision: str) -> None:
    """Compare results and gradients with FP32's, relative to their norms."""
    found = []
    for one in (model, qsync.wrap(copy.deepcopy(model), precision, strict=True)):
        given = x.clone().requires_grad_()
        y = one(given)
        (y * torch.sin(torch.arange(y.numel()).view(y.shape) + 0.5)).sum().backward()
        gradients = [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
        found.append([y.detach(), given.grad, *gradients])
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.filterwarnings("ignore:qsync. .* of . products:UserWarning")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_coinciding_operands(name, precision):
    torch.manual_seed(0)
    agree(Model(PRODUCTS[name]), torch.randn(W, W), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("stride", "padding", "size"), [(2, 2, 4), (2, 1, 2), (3, 3, 3), (2, 1, 8), (1, 0, 4)]
)
def test_a_convolution_of_one_pixel_whose_result_is_as_large_as_its_image(stride, padding, size, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(W, W, 3, padding=1), nn.Conv2d(W, W, 1, stride=stride, padding=padding))
    agree(model, torch.randn(2, W, size, size), precision)

"""Bilinear layers train under a plan as any product does."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from observing import decibels
from torch import nn

import qsync
from qsync.backend.kernels.bilinear import bilinear
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 48), nn.Linear(12, 40)
        self.pair, self.last = nn.Bilinear(48, 40, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pair(self.left(x), self.right(x)))


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("precision", "least_db"), [("fp32", 110), ("bf16", 38)])
def test_gradients_are_those_of_torch(precision, least_db):
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(3, 5, 12)
    graph = qsync.capture(model, x)
    expected = gradients(copy.deepcopy(model), x)
    of_all = dict.fromkeys((op.name for op in graph.adjustable), Precision(precision))
    assert "pair" in of_all
    plan = Plan(graph.model, graph.hash, {"cpu": ClassPlan(of_all)})
    planned = qsync.wrap(copy.deepcopy(model), plan)
    assert decibels(gradients(planned, x), expected) > least_db
    bitwise = qsync.wrap(copy.deepcopy(model), "fp32", bitwise=True)
    assert decibels(gradients(bitwise, x), expected) == math.inf


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_wanted_are_computed(wanted):
    torch.manual_seed(0)
    shapes = [(7, 5), (7, 3), (4, 5, 3)]
    values = [torch.randn(shape).requires_grad_(k in wanted) for k, shape in enumerate(shapes)]
    weight = torch.randn(7, 4)

    def found(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((y * weight).sum(), [values[k] for k in wanted])

    expected = found(torch.nn.functional.bilinear(*values))
    got = found(bilinear(torch.nn.functional.bilinear, "fp32", *values))
    assert all(torch.allclose(own, its, atol=1e-5) for own, its in zip(got, expected, strict=True))

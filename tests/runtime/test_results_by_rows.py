"""What leaves a traced graph lies in memory as it was traced, or by rows: callers may view it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync

FORMS = {
    "some channels": lambda y: y[:, :3],
    "a piece": lambda y: y.split(4, 1)[1],
    "one image": lambda y: y[0],
    "channels apart": lambda y: y.view(2, 2, 4, 9, 9),
    "swapped": lambda y: y.transpose(2, 3),
}


class Convolved(nn.Module):
    """A convolution, and a form of its result."""

    def __init__(self, form):
        super().__init__()
        self.conv, self.form = nn.Conv2d(4, 8, 3, padding=1), form

    def forward(self, x):
        return self.form(self.conv(x))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_convolution_s_result_can_be_viewed(form, precision):
    torch._dynamo.reset()
    model, images = Convolved(FORMS[form]), torch.randn(2, 4, 9, 9)
    found, expected = qsync.wrap(copy.deepcopy(model), precision, strict=True)(images), model(images)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    if form != "swapped":
        assert found.view(len(found), -1).shape == expected.view(len(expected), -1).shape


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8"])
def test_strides_are_those_of_a_result_that_lies_by_rows(precision):
    torch._dynamo.reset()
    model = nn.Sequential(
        Convolved(lambda y: y.as_strided((2, 8, 9, 9), (648, 81, 9, 1))), nn.Conv2d(8, 4, 3)
    )
    images = torch.randn(2, 4, 9, 9)
    found, expected = qsync.wrap(copy.deepcopy(model), precision, strict=True)(images), model(images)
    assert (found - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("images", [False, True])
def test_an_empty_batch_passes_a_batch_norm_that_saves_less(precision, images):
    torch._dynamo.reset()
    if images:
        layers, batch = [nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)], torch.randn(0, 4, 9, 9)
    else:
        layers, batch = [nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)], torch.randn(0, 16)
    wrapped = qsync.wrap(nn.Sequential(*layers), precision, save_less=True, strict=True)
    wrapped(batch).sum().backward()
    assert wrapped[0].weight.grad.count_nonzero() == 0


def test_a_linear_layer_whose_weight_is_a_vector_stays_in_fp32():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.direction = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x):
            return F.linear(self.first(x), self.direction)

    torch.manual_seed(0)  # a dot product may come close to zero
    model, batch = Scored(), torch.randn(3, 8)
    (op,) = (op for op in qsync.capture(model, batch).ops if op.name == "linear")
    assert op.fixed_because == "its weight is no matrix"
    found = qsync.wrap(copy.deepcopy(model), "int8", strict=True)(batch)
    assert (found - model(batch)).norm() <= 0.05 * model(batch).norm()

"""Interpolation whose backward reads a gradient in its own order: torch's bits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.backend.kernels.interpolate import interpolate

MODES = [
    {"size": (9, 7), "mode": "bilinear", "align_corners": False}, {"scale_factor": 2.0},
    {"size": 5, "mode": "nearest-exact"}, {"scale_factor": (2.0, 1.5), "mode": "bicubic"},
    {"size": (3, 3), "mode": "area"},
]  # fmt: skip


def part(shape, dtype):
    """Images that are a part of others in channels-last order."""
    whole = torch.randn(shape[0], 3 * shape[1], *shape[2:]).to(dtype)
    return whole.contiguous(memory_format=torch.channels_last)[:, shape[1] : 2 * shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("channels", [1, 6])
def test_the_result_and_the_gradient_are_torch_s_to_the_bit(channels, options, dtype):
    torch.manual_seed(0)
    shape = (2, channels, 6, 4)
    for make_x in (part, lambda *of: part(*of).contiguous()):
        x = make_x(shape, dtype).requires_grad_()
        ours, theirs = (run(x, **options) for run in (partial(interpolate, F.interpolate), F.interpolate))
        assert torch.equal(ours, theirs)
        for make_g in (part, lambda *of: part(*of).contiguous()):
            g = make_g(theirs.shape, dtype)
            assert torch.equal(*(torch.autograd.grad(y, x, g, retain_graph=True)[0] for y in (ours, theirs)))


def test_a_gradient_that_is_a_part_of_another_is_made_dense_in_its_order():
    x = part((2, 6, 4, 4), torch.float32).requires_grad_()
    y = interpolate(F.interpolate, x, scale_factor=2.0)
    seen = []
    y.grad_fn.next_functions[0][0].register_prehook(lambda gradients: seen.append(gradients[0]))
    y.backward(part(y.shape, torch.float32))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("write", [lambda y: y.mul_(2.0), lambda y: y[:, 0].zero_()], ids=["whole", "part"])
def test_what_follows_may_write_over_the_result(write):
    x, g = (part(shape, torch.float32) for shape in ((2, 6, 4, 4), (2, 6, 8, 8)))
    x.requires_grad_()
    found = []
    for run in (partial(interpolate, F.interpolate), F.interpolate):
        y = run(x, scale_factor=2.0, mode="bilinear")
        write(y)
        found.append((y, *torch.autograd.grad(y, x, g)))
    assert all(map(torch.equal, *found))


def test_antialiasing_in_bf16_computes_in_fp32():
    x = part((2, 6, 4, 4), torch.bfloat16)
    options = {"size": (3, 2), "mode": "bilinear", "antialias": True}
    got = interpolate(F.interpolate, x, **options)
    assert torch.equal(got, F.interpolate(x.float(), **options).bfloat16())


def test_other_inputs_are_left_to_torch():
    x = torch.randn(2, 3, 8, requires_grad=True)
    assert "Upsample" in interpolate(F.interpolate, x, scale_factor=2.0, mode="linear").grad_fn.name()


class Decoder(nn.Module):
    """Values of two sizes side by side, before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.fuse = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(35, 8, 1)

    def forward(self, x):
        up = F.interpolate(self.small(x), size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.fuse(torch.cat([up, x], dim=1)).float().square().mean()


def test_it_runs_in_lowered_graphs_alone():
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(2, 3, 32, 32)
    for precision, own in (("fp32", False), ("bf16", True)):
        wrapped = qsync.wrap(copy.deepcopy(model), precision, strict=True)
        loss, functions = wrapped(x), set()
        left = [loss.grad_fn]
        while left:
            function = left.pop()
            if function is not None and function not in functions:
                functions.add(function)
                left += [following for following, _ in function.next_functions]
        assert any("DenseGradient" in function.name() for function in functions) == own
        loss.backward()
        assert wrapped.small.weight.grad.isfinite().all()

"""Convolutions are right at every shape, also where oneDNN miscomputes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsync
from qsync.backend import Operand, encode
from qsync.backend.selection.kernel_candidates import direct
from qsync.backend.selection.shape_checks import checked, without_onednn
from qsync.errors import MiscomputedError

# Shapes of which oneDNN leaves parts unwritten on processors with AMX (torch 2.13).
FORMS = {
    "one pixel wide": (nn.Conv2d(3, 8, 3, stride=2, padding=1), (4, 3, 16, 2)),
    "patches": (nn.Conv2d(16, 16, 4, stride=4), (2, 16, 32, 32)),
    "patches of signals": (nn.Conv1d(16, 16, 4, stride=4), (2, 16, 64)),
    "transposed": (nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1), (2, 8, 16, 1)),
    "volumes": (nn.Conv3d(3, 8, 3, stride=2, padding=1), (2, 3, 8, 8, 1)),
}


@pytest.mark.filterwarnings("ignore:qsync")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_a_convolution_is_right(form, precision):
    torch._dynamo.reset()
    layer, shape = FORMS[form]
    model, images = nn.Sequential(copy.deepcopy(layer)), torch.randn(shape)
    lowered = qsync.wrap(copy.deepcopy(model), precision, strict=True)

    def outcome(run):
        x = images.clone().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        return y.detach(), x.grad, *(parameter.grad for parameter in run.parameters())

    found_here = outcome(lowered)
    with without_onednn():
        expected_here = outcome(model)
    for found, expected in zip(found_here, expected_here, strict=True):
        assert (found - expected).norm() <= 0.05 * expected.norm()


def half_unwritten(target, out_type, *args, **kwargs):
    """What leaves every other result as it finds the memory."""
    y = direct(target, out_type, *args, **kwargs)
    return torch.where(torch.arange(len(y)).view(-1, 1, 1, 1) % 2 == 0, y, torch.full_like(y, 7.0))


def test_a_form_is_checked_once_and_what_is_wrong_is_not_run():
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return direct(*args, **kwargs)

    x, w = torch.randn(4, 3, 6, 6).bfloat16(), torch.randn(8, 3, 3, 3).bfloat16()
    kernel = checked(counted)
    for _ in range(3):
        kernel(torch.conv2d, "fp32", x, w, None, padding=1)
    assert len(calls) == 3 + 3
    kernel(torch.conv2d, "fp32", x, w, None, padding=0)
    kernel(torch.conv2d, "fp32", x[:0], w, None, padding=0)  # of nothing nothing is wrong
    assert len(calls) == 6 + 4 + 1
    with pytest.raises(MiscomputedError, match="computes this convolution wrongly"):
        checked(half_unwritten)(torch.conv2d, "fp32", x, w, None, padding=1)


def test_of_a_batch_some_images_are_checked_and_a_form_named_by_keywords_is():
    sizes = []

    def kernel(target, out_type, *args, **kwargs):
        sizes.append(len(kwargs.get("input", args[0] if args else None)))
        return direct(target, out_type, *args, **kwargs)

    x, w = torch.randn(9, 3, 6, 6).bfloat16(), torch.randn(8, 3, 3, 3).bfloat16()
    run = checked(kernel)
    run(torch.conv2d, "fp32", x, w)
    run(torch.conv2d, "fp32", x[:7], w)  # some of as many: checked already
    assert sizes == [4, 4, 4, 9, 7]
    run(torch.conv2d, "fp32", input=x, weight=w)
    assert sizes[5:] == [9] * 4


def test_the_check_sees_codes_as_the_kernel_does():
    x, w = torch.randn(4, 8, 6, 6), torch.randn(8, 8, 3, 3)
    given = Operand(x, encode(x, "int8_image")), Operand(w, encode(w, "int8_channel"))
    seen = []

    def kernel(target, out_type, x, w):
        seen.append((x.encoded.layout, w.encoded.layout))
        return target(x.value, w.value)

    checked(kernel)(torch.conv2d, "fp32", *given)
    assert seen == [("image", "channel")] * 4


def test_a_check_leaves_random_numbers_as_they_were():
    def random(target, out_type, *args, **kwargs):
        return direct(target, out_type, *args, **kwargs) * torch.ones(()).bernoulli_(1.0)

    x, w = torch.randn(4, 3, 6, 6), torch.randn(8, 3, 3, 3)
    torch.manual_seed(1)
    checked(random)(torch.conv2d, "fp32", x, w)
    found = torch.rand(3)
    torch.manual_seed(1)
    random(torch.conv2d, "fp32", x, w)
    assert torch.equal(found, torch.rand(3))

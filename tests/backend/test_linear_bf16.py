"""Linear layers in BF16 whose weight's gradient comes from transposed copies: torch's, to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.backend import shape_choices
from qsync.backend.kernels import linear_bf16 as kernels
from qsync.backend.kernels.linear_bf16 import addmm_bf16, linear_bf16, transposed_product
from qsync.backend.selection import kernel_selection


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().requires_grad_()


@pytest.fixture
def from_copies(monkeypatch):
    """A processor with AMX on which copies pay at every shape; the list of the products made from them."""
    made = []
    product = kernels._from_copies

    def noted(a, b):
        made.append((a.shape, b.shape))
        return product(a, b)

    for module in (kernels, kernel_selection):
        monkeypatch.setattr(module, "has_amx", lambda device: device.type == "cpu")
    monkeypatch.setattr(kernels, "_copies_pay", lambda *sizes: True)
    monkeypatch.setattr(kernels, "_from_copies", noted)
    return made


SIZES = [(70, 33, 65), (64, 32, 64), (40, 200, 7), (5, 1, 3), (300, 40, 300)]


@pytest.mark.parametrize(("rows", "width", "outputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_results_and_gradients_are_torch_s(from_copies, kind, biased, rows, width, outputs):
    x, bias = draw(rows, width), draw(outputs, seed=2)
    weight = draw(*((outputs, width) if kind == "linear" else (width, outputs)), seed=1)
    gradient = draw(rows, outputs, seed=3).detach()
    if kind == "linear":
        leaves = (x, weight, bias) if biased else (x, weight)
        plain, own = F.linear(*leaves), linear_bf16(F.linear, *leaves)
    else:
        leaves = (bias, x, weight)
        plain, own = torch.addmm(*leaves), addmm_bf16(torch.addmm, *leaves)
    assert torch.equal(own, plain)
    expected = torch.autograd.grad(plain, leaves, gradient)
    found = torch.autograd.grad(own, leaves, gradient)
    assert len(from_copies) == 1
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
        assert (a - b).float().norm() <= 3e-3 * b.float().norm()


@pytest.mark.parametrize(("rows", "width", "other"), SIZES)
def test_the_smaller_copies_are_made(monkeypatch, rows, width, other):
    copied = []
    monkeypatch.setattr(kernels, "_transposed", lambda m: copied.append(m.numel()) or m.t().contiguous())
    a, b = draw(rows, width).detach(), draw(rows, other, seed=1).detach()
    product = kernels._from_copies(a, b)
    torch.testing.assert_close(product, a.t() @ b, rtol=2e-2, atol=0.2)
    assert sum(copied) == min(rows * width, rows * other + width * other)


def test_only_what_has_a_gradient_is_computed_and_saved(from_copies):
    x, weight = draw(6, 4), draw(8, 4, seed=1)
    frozen = weight.detach()
    assert linear_bf16(F.linear, x, frozen).grad_fn.name() != "_ProductBackward"
    with torch.no_grad():
        assert linear_bf16(F.linear, x, weight).grad_fn is None
    y = linear_bf16(F.linear, x.detach(), weight)
    (product, _), *_ = y.grad_fn.next_functions
    assert [t is not None for t in product.saved_tensors] == [True, False]
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, 4).bfloat16(), rtol=2e-2, atol=2e-2)
    assert x.grad is None


def test_other_calls_are_torch_s(from_copies):
    x, weight, bias = draw(6, 4), draw(4, 8, seed=1), draw(8, seed=2)
    for found, expected in (
        (addmm_bf16(torch.addmm, bias, x, weight, alpha=2), torch.addmm(bias, x, weight, alpha=2)),
        (addmm_bf16(torch.addmm, bias[None], x, weight), torch.addmm(bias[None], x, weight)),
        (linear_bf16(F.linear, x[0], weight.t()), F.linear(x[0], weight.t())),
        (linear_bf16(F.linear, x, weight[:, 0]), F.linear(x, weight[:, 0])),
        (linear_bf16(F.linear, x.double(), weight.t().double()), F.linear(x.double(), weight.t().double())),
    ):
        assert torch.equal(found, expected) and found.grad_fn.name() == expected.grad_fn.name()


def test_operands_that_lie_otherwise_are_multiplied_as_they_lie(from_copies):
    a, b = draw(8, 6).detach(), draw(8, 4, seed=1).detach()
    across = a.t().contiguous().t()
    assert torch.equal(transposed_product(across, b), across.t() @ b)
    assert torch.equal(transposed_product(a.float(), b.float()), a.float().t() @ b.float())
    assert not from_copies


def test_a_shape_is_timed_once_and_few_or_many_elements_never(monkeypatch, tmp_path):
    chosen = []
    monkeypatch.setattr(shape_choices, "choices", lambda: kept)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    kept = shape_choices.Choices("shapes", {})
    monkeypatch.setattr(shape_choices, "choose", lambda key, runs: chosen.append(key) or 1)
    assert kernels._copies_pay(512, 512, 512) and kernels._copies_pay(512, 512, 512)
    assert len(chosen) == 1
    assert not kernels._copies_pay(64, 64, 64)  # few products
    assert not kernels._copies_pay(2**13, 2**12, 2**12)  # many copies
    assert not kernels._copies_pay(2**12, 2**15, 2**5)  # many elements to time
    assert len(chosen) == 1


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 8)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_lowered_models_take_it_and_plain_ones_do_not(monkeypatch, from_copies, precision):
    torch.manual_seed(0)
    plain, x = Layers(), torch.randn(3, 20, 24)
    gradients = []
    for pay in (True, False):
        monkeypatch.setattr(kernels, "_copies_pay", lambda *sizes, pay=pay: pay)
        model = qsync.wrap(copy.deepcopy(plain), precision, strict=True)
        model(x).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    ours = [shapes for shapes in from_copies if shapes[0][0] == 60]  # kernels are tried on others
    assert len(ours) == (0 if precision == "fp32" else 2)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 5e-3 * b.norm()

"""GELU's tanh form in BF16: against torch's in FP64, and where torch's own runs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.backend.kernels.gelu import gelu

PARTS = ((3, 5), (2, 3, 64), (7,), (0, 4))


def forbidden(*_, **__):
    pytest.fail("torch's own GELU ran")


@pytest.mark.parametrize("shape", PARTS, ids=str)
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
def test_values_and_gradients_are_those_of_fp64(shape, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr("qsync.backend.kernels.gelu.compiled_for", lambda *_: None)
    x = (torch.randn(shape) * 3).bfloat16().requires_grad_()
    g = torch.randn(shape).bfloat16()
    y = gelu(forbidden, x, approximate="tanh")
    y.backward(g)
    exact = x.detach().double().requires_grad_()
    F.gelu(exact, approximate="tanh").backward(g.double())
    torch.testing.assert_close(y.double(), F.gelu(exact, approximate="tanh"), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-6, atol=4e-3)


def test_what_torch_computes_as_fast_is_left_to_it():
    x = torch.randn(4, 6)
    ours = (x, "tanh"), (x.bfloat16(), "none"), (x.bfloat16().t(), "tanh"), (x.bfloat16()[0, 0], "tanh")
    for value, form in ours:
        y = gelu(F.gelu, value.requires_grad_(), approximate=form)
        assert y.grad_fn.name().startswith("GeluBackward")
        assert torch.equal(y, F.gelu(value, approximate=form))


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_it_runs_between_bf16_products_alone(form):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(form), nn.Linear(64, 32))
    x = torch.randn(16, 32)
    expected, in_fp32 = model(x), qsync.wrap(copy.deepcopy(model), "fp32", bitwise=True)
    assert torch.equal(in_fp32(x), expected)

    def kinds(node, found):
        if node is not None and node.name() not in found:
            found.add(node.name())
            for following, _ in node.next_functions:
                kinds(following, found)
        return found

    y = qsync.wrap(model, "bf16", strict=True)(x)
    assert ("_GeluBackward" in kinds(y.grad_fn, set())) == (form == "tanh")
    assert "_GeluBackward" not in kinds(in_fp32(x).grad_fn, set())


def test_a_changed_input_is_noticed():
    x = torch.randn(4, 8).bfloat16().requires_grad_()
    h = x * 2
    y = gelu(F.gelu, h, approximate="tanh")
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

"""Indicators from the literature, each against its equation by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from probed_models import linear, mixed, summed
from torch import nn

import qsync
from qsync.backend.encoding import decode, encode
from qsync.experiments.sensitivity.baselines import BASELINES, sensitivity_by
from qsync.operators.precision import Precision

BF16, INT8 = Precision.BF16, Precision.INT8


def test_fisher_is_the_squared_change_of_the_loss_by_independent_errors():
    model, x = linear()
    layer = model[0]
    w, b, x = layer.weight, layer.bias, x.clone().requires_grad_()
    gradients = torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, w, b))
    errors = [t.detach().bfloat16().float() - t.detach() for t in (x, w, b)]
    by_hand = sum(float((g * e).square().sum()) for g, e in zip(gradients, errors, strict=True))
    found = sensitivity_by("fisher", model, [x.detach()], summed, precisions=[BF16])
    assert found.omega["0"]["bf16"] == pytest.approx(by_hand, rel=1e-5)


def test_hessian_is_the_trace_times_the_squared_error_of_the_weight():
    """Of sum (x W' + b)^2 the trace is 2 N |x|^2 for the weight and 2 M N for the bias, M rows, N outputs."""
    model, x = linear()
    w = model[0].weight.detach()
    error = float((decode(encode(w, "int8_row")) - w).square().mean())
    found = sensitivity_by("hessian", model, [x] * 8, summed, precisions=[INT8])
    assert found.omega["0"]["int8"] == pytest.approx(2 * 16 * float(x.square().sum()) * error, rel=0.3)


@pytest.mark.parametrize("shape", [(32, 16), (3, 8)])
def test_depth_weighs_relative_errors_downstream_and_upstream(shape):
    """The only operator of a model is as deep as the model: no forward error counts, the backward ones do."""
    torch.manual_seed(0)
    if shape == (32, 16):
        model, x = nn.Sequential(nn.Linear(32, 16, bias=False)), torch.randn(8, 32)
    else:
        model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False)), torch.randn(2, 3, 6, 6)
    w = model[0].weight.detach().requires_grad_()
    y = F.linear(x, w) if x.ndim == 2 else F.conv2d(x, w, padding=1)
    g = 2 * y.detach()
    (dw,) = torch.autograd.grad(y, w, g)
    v_x, v_w, v_g = (float((t.detach().bfloat16().float() - t.detach()).square().mean()) for t in (x, w, g))
    n, k = w.shape[0], w[0].numel()
    m = y.numel() // n
    g2, w2 = (float(t.detach().square().sum()) for t in (g, w))
    x2 = float(x.square().sum()) * m * k / x.numel()
    expected = v_x * k * g2 + v_g * n * x2
    expected += float(dw.square().sum()) * (v_g * m * n / g2 + v_w * k * n / w2)
    found = sensitivity_by("depth", model, [x], summed, precisions=[BF16])
    assert found.omega["0"]["bf16"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_scores_every_operator_and_leaves_the_model_alone(name):
    model, x = mixed()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, again, other = (
        sensitivity_by(name, model, [x], summed, precisions=[BF16, INT8], seed=seed) for seed in (2, 2, 3)
    )
    assert first.omega == again.omega and (first.indicator, first.num_batches) == (name, 1)
    assert (first.omega == other.omega) is (name not in ("random", "hessian"))
    assert first.graph_hash == qsync.capture(model, x).hash
    assert set(first.omega) == {"first", "second", "matmul"}
    assert all(added >= 0 for modes in first.omega.values() for added in modes.values())
    assert min(first.omega["first"].values()) > 0
    assert (first.omega["matmul"]["bf16"] == 0.0) is (name == "hessian")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

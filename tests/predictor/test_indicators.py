"""The truth against its equation by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from probed_models import linear, mixed, summed
from torch import nn

import qsync
from qsync import backend
from qsync.api import INDICATORS, calibrating
from qsync.backend.encoding import Operand, encode
from qsync.errors import CalibrationError, UnsupportedError
from qsync.operators.precision import Precision
from qsync.predictor.sensitivity.empirical import errors_by_batch, gradient_errors


def test_the_truth_of_a_linear_layer_is_the_difference_that_its_kernel_makes():
    model, x = linear()
    layer = model[0]
    operands = [Operand(t, encode(t.detach(), "int8_row")) for t in (x, layer.weight)]
    kernel = backend.select("cpu").kernel("linear", Precision.INT8)
    parameters = [layer.weight, layer.bias]
    low = torch.autograd.grad(kernel(F.linear, "fp32", *operands, layer.bias).square().sum(), parameters)
    exact = torch.autograd.grad(summed(model, x), parameters)
    by_hand = sum(float((a - b).square().sum()) for a, b in zip(low, exact, strict=True))
    truth = qsync.sensitivity(model, [x], summed, indicator="empirical", precisions=["int8"])
    assert truth.omega == {"0": {"int8": pytest.approx(by_hand, rel=1e-5)}}
    assert (truth.indicator, truth.num_batches) == ("empirical", 1)


def test_the_truth_is_a_mean_over_batches_and_draws():
    model, x = linear()
    one, other, both = (
        qsync.sensitivity(model, data, summed, indicator="empirical", precisions=["bf16"]).omega["0"]["bf16"]
        for data in ([x], [2 * x], [x, 2 * x])
    )
    assert both == pytest.approx((one + other) / 2)
    with calibrating(model, [x, 2 * x], summed) as calibration:
        by_batch = errors_by_batch(calibration, [{"0": Precision.BF16}])
        few, many = (gradient_errors(calibration, [{"0": Precision.INT8_ALL}], draws)[0] for draws in (1, 4))
    assert by_batch == [[pytest.approx(one), pytest.approx(other)]]
    assert few != many  # every draw rounds otherwise
    assert few == pytest.approx(many, rel=0.3)


def test_joint_effects_are_measured_and_no_lowering_is_no_error():
    model, x = mixed()
    with calibrating(model, [x], summed) as calibration:
        single = {name: Precision.INT8 for name in ("first", "second")}
        errors = gradient_errors(calibration, [{}, *({name: p} for name, p in single.items()), single])
    assert errors[0] == 0.0
    assert errors[3] == pytest.approx(errors[1] + errors[2], rel=0.6)


def test_dropout_is_no_part_of_the_truth():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5)), torch.randn(8, 32)
    noisy = qsync.sensitivity(model, [x], summed, indicator="empirical", precisions=["bf16"])
    gradient = torch.autograd.grad(summed(model, x), list(model.parameters()))
    assert noisy.omega["0"]["bf16"] < 1e-3 * sum(float(g.square().sum()) for g in gradient)


@pytest.mark.parametrize("indicator", INDICATORS)
def test_every_indicator_names_the_operator_where_there_is_no_gradient(indicator):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(8, 4)
    for loss, words in (
        (lambda model, batch: (model(batch) * 0).sqrt().sum(), "^the gradient that reaches 2 is NaN or Inf"),
        (lambda model, batch: (model(batch) * 0).sum(), "^the gradient is zero everywhere, from 2 on"),
    ):
        with pytest.raises(CalibrationError, match=words):
            qsync.sensitivity(model, [x], loss, indicator=indicator, precisions=["bf16"])
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="^2 met NaN or Inf in the calibration data; clean"):
        qsync.sensitivity(model, [x], summed, indicator=indicator, precisions=["bf16"])


def test_what_is_nan_only_when_lowered_is_named_with_what_was_lowered():
    """1e6 is beyond FP16, and FP32 has no trouble with it."""
    model, x = linear()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * 1e-6).square().sum()

    with pytest.raises(CalibrationError, match="^with 0 in fp16 the loss is NaN or Inf; clean the batch, or"):
        qsync.sensitivity(model, [1e6 * x], loss, indicator="empirical", precisions=["fp16"])


@pytest.mark.parametrize("name", INDICATORS)
def test_every_indicator_scores_every_operator_from_its_seed_and_leaves_the_model_alone(name):
    model, x = mixed()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, again = (
        qsync.sensitivity(model, [x], summed, indicator=name, precisions=["bf16", "int8"], seed=2)
        for _ in "ab"
    )
    assert first.omega == again.omega
    assert first.indicator == name
    assert first.graph_hash == qsync.capture(model, x).hash
    assert set(first.omega) == {"first", "second", "matmul"}
    assert all(added >= 0 for modes in first.omega.values() for added in modes.values())
    assert min(first.omega["first"].values()) > 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unknown_indicator_is_one_sentence_with_the_nearest():
    model, x = linear()
    with pytest.raises(
        UnsupportedError,
        match=r"^unknown indicator 'varience' \(nearest: 'variance'\); choose one of variance, ",
    ):
        qsync.sensitivity(model, [x], summed, indicator="varience")


def test_what_is_to_be_measured_has_to_run_here():
    model, x = linear()
    with pytest.raises(UnsupportedError, match="cannot run tf32; choose from fp32, bf16"):
        qsync.sensitivity(model, [x], summed, indicator="empirical", precisions=["tf32"])
    assert "tf32" not in qsync.sensitivity(model, [x], summed, indicator="empirical").omega["0"]

"""The equations of the depth indicator (QSync's) against what the real kernels do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync import backend
from qsync.backend.encoding import decode, encode
from qsync.predictor.sensitivity.other_indicators.qsync_depth import (
    Gatherer,
    OpStatistics,
    indicator,
    product_terms,
    rounding_variance,
)
from qsync.records.graph import Op, Role
from qsync.records.precision import Precision, is_encoded, operand_type
from qsync.runtime import planned_forward


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, with rows of different scale."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    return values * torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator))


@pytest.mark.parametrize(
    "type_name", ["int8_row", "int8_col", "int8_inner", "int8_image", "int8_channel", "fp8_row"]
)
def test_rounding_variance_is_what_encoding_does(type_name):
    x = spread(256, 384)
    if type_name in ("int8_image", "int8_channel"):
        x = spread(64, 8, 6, 8)
    error = decode(encode(x, type_name)) - x
    assert float(rounding_variance(x, type_name)) == pytest.approx(float(error.square().mean()), rel=0.1)


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("e5m2", torch.float8_e5m2)]
)
def test_rounding_variance_is_what_converting_does(type_name, dtype):
    x = spread(256, 384)
    error = x.to(dtype).float() - x
    assert float(rounding_variance(x, type_name)) == pytest.approx(float(error.square().mean()), rel=0.1)


def test_stochastic_rounding_adds_twice_the_variance_of_nearest():
    x = spread(64, 64)
    nearest, stochastic = (float(rounding_variance(x, t)) for t in ("int8_row", "int8_stochastic"))
    assert stochastic == pytest.approx(2 * nearest)


def test_zeros_and_empty_tensors_add_nothing():
    for type_name in ("int8_row", "bf16", "fp8_row"):
        assert float(rounding_variance(torch.zeros(4, 4), type_name)) == 0.0
        assert float(rounding_variance(torch.zeros(0, 4), type_name)) == 0.0


def made(op: Op, operands: list[torch.Tensor], result: torch.Tensor, gradient: torch.Tensor) -> OpStatistics:
    types = [
        {str(operand_type(op.kind, i, p)) for p in (Precision.BF16, Precision.INT8)}
        for i in range(len(operands))
    ]
    return OpStatistics(
        [tuple(t.shape) for t in operands],
        [float(t.square().sum()) for t in operands],
        [
            {t: float(rounding_variance(x, t)) for t in known}
            for x, known in zip(operands, types, strict=True)
        ],
        float(result.square().sum()),
        float(gradient.square().sum()),
        {"bf16": float(rounding_variance(gradient, "bf16"))},
        True,
    )


CASES = {
    "linear": (F.linear, (128, 96), (64, 96), {}),
    "conv2d": (torch.conv2d, (8, 16, 12, 12), (32, 16, 3, 3), {"padding": 1}),
    "strided": (torch.conv2d, (8, 16, 12, 12), (32, 16, 3, 3), {"stride": 2}),
    "grouped": (torch.conv2d, (8, 16, 12, 12), (32, 4, 3, 3), {"padding": 1, "groups": 4}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_forward_and_weight_gradient_terms_are_the_measured_errors(case, precision, fast_products):
    target, x_shape, w_shape, options = CASES[case]
    kind = "linear" if case == "linear" else "conv2d"
    x, w = spread(*x_shape).requires_grad_(), (spread(*w_shape, seed=1) / 10).requires_grad_()
    y = target(x, w, None, **options)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    _, dw = torch.autograd.grad(y, (x, w), gradient)
    op = Op("op", kind, Role.ADJUSTABLE, ("x", "w"), (), "fp32", tuple(y.shape), 1, True, 0.0, 1)
    terms = product_terms(op, precision, made(op, [x.detach(), w.detach()], y.detach(), gradient))

    kernels = backend.select("cpu")
    if precision is Precision.INT8:
        kernel = kernels.kernel(kind, precision)
        operands = [
            backend.Operand(t, encode(t, operand_type(kind, i, precision))) for i, t in enumerate((x, w))
        ]
        low = kernel(target, "fp32", *operands, None, **options)
    else:
        low = target(x.bfloat16(), w.bfloat16(), None, **options)
    _, low_dw = torch.autograd.grad(low, (x, w), gradient.to(low.dtype))
    # The result of a BF16 product is rounded once more, to BF16: part of the measured error, not of the term.
    rounded = float(rounding_variance(y, "bf16")) * y.numel() if precision is Precision.BF16 else 0.0
    y, low = y.detach(), low.detach()
    forward = (float((low.float() - y).square().sum()) - rounded) / float(y.square().sum())
    assert terms.forward == pytest.approx(forward, rel=0.35)
    rounded = float(rounding_variance(dw, "bf16")) * dw.numel()
    measured = float((low_dw - dw).square().sum()) - rounded
    assert terms.wgrad == pytest.approx(measured, rel=0.35)


def test_an_operator_that_never_ran_adds_nothing():
    op = Op("op", "linear", Role.ADJUSTABLE, ("x", "w"), (), "fp32", (2, 2), 1, True, 0.0, 1)
    graph = qsync.OpGraph("model", (), (op,))
    assert indicator(graph, {}, 1.0, [Precision.INT8]) == {"op": {"int8": 0.0}}


def test_encoded_and_carried_types_are_told_apart():
    assert is_encoded("int8_row") and is_encoded("fp16") and not is_encoded("bf16")


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_the_terms_of_an_embedding_are_the_measured_errors(precision):
    """Its rows are rounded, and so is the gradient that it adds up."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(64, 96), nn.Linear(96, 8)
            with torch.no_grad():
                self.embedding.weight.copy_(spread(64, 96))

        def forward(self, places: torch.Tensor) -> torch.Tensor:
            return self.last(self.embedding(places)).square().mean()

    model, places = Model(), torch.arange(512) * 7 % 61
    runner, gatherer = planned_forward.attach(model, lambda graph: {}), Gatherer([precision])
    runner.choose(lambda graph: {}, gatherer)
    loss = model(places)
    gatherer.describe(runner.graph)
    loss.backward()
    planned_forward.detach(model)
    op = next(op for op in runner.graph.ops if op.kind == "embedding")
    found = gatherer.statistics()[op.name]
    terms = product_terms(op, precision, found)

    weight = model.embedding.weight.detach().requires_grad_()
    kernel = backend.select("cpu").kernel("embedding", precision)
    exact = F.embedding(places, weight)
    wide, low = (kernel(F.embedding, out_type, places, weight) for out_type in ("fp32", "bf16"))
    forward = (wide - exact).square().sum() / exact.square().sum()
    assert terms.forward == pytest.approx(forward.item(), rel=0.1) and terms.dgrad == 0.0
    g = spread(512, 96, seed=3)
    (dw,), (low_dw,) = (torch.autograd.grad(y, weight, g.to(y.dtype)) for y in (exact, low))
    added = float(rounding_variance(g, "bf16")) * g.numel()
    assert added == pytest.approx(float((low_dw - dw).square().sum()), rel=0.1)
    assert terms.wgrad == found.gradient_rounding["bf16"] * exact.numel() > 0

"""The reference: its gradients against finite differences, its roundings against their definitions."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import TARGETS, arguments_of, outcome, sample
from torch.nn import functional as F

from qsync.backend import Operand, decode, encode, reference_kernel
from qsync.backend.reference_kernels import round_mantissa
from qsync.operators.precision import MANTISSA_BITS, Precision
from qsync.operators.registry import PRECISIONS_BY_KIND

# Kind -> the shapes of its operands, and its options.
CALLS = {
    "linear": ([(5, 7), (3, 7), (3,)], {}),
    "addmm": ([(3,), (5, 7), (7, 3)], {}),
    "conv2d": ([(2, 3, 6, 6), (4, 3, 3, 3), (4,)], {"padding": 1}),
    "conv1d": ([(2, 3, 9), (4, 3, 3), (4,)], {"padding": 1}),
    "conv3d": ([(2, 3, 3, 4, 4), (4, 3, 2, 3, 3), (4,)], {"padding": 1}),
    "conv_transpose": ([(2, 3, 4, 5), (3, 4, 3, 3), (4,)], {"stride": 2}),
    "matmul": ([(2, 5, 7), (2, 7, 3)], {}),
    "baddbmm": ([(2, 1, 3), (2, 5, 7), (2, 7, 3)], {"alpha": 0.5}),
    "attention": ([(1, 2, 5, 4)] * 3, {}),
    "embedding": ([(7, 9)], {"places": torch.arange(12).view(3, 4) % 5}),
    "einsum": ([(2, 5, 7), (2, 7, 3)], {"equation": "bij,bjk->bik"}),
    "grouped_mm": ([(6, 7), (3, 7, 4)], {"offs": torch.tensor([2, 4, 6])}),
    "bilinear": ([(5, 7), (5, 4), (3, 7, 4), (3,)], {}),
    "rnn": ([(2, 5, 3), (16, 3), (16, 4), (16,), (16,)], {}),
}
# Relative error, root mean square, of result and gradients against FP32 for operands of normal distribution.
LARGEST_ERROR = {
    "fp32": 1e-6,
    "tf32": 1e-3,
    "bf16": 8e-3,
    "fp16": 1e-3,
    "mxfp8": 0.1,  # the largest values of a block may saturate
    "fp8": 8e-2,
    "int8": 2e-2,
    "int8_all": 3e-2,
}


def tensors_of(kind):
    return [sample(*shape, seed=i) for i, shape in enumerate(CALLS[kind][0])]


def run(kind, precision):
    """Result and gradients of the reference."""
    torch.manual_seed(0)
    kernel, (_, options) = reference_kernel(kind, precision), CALLS[kind]
    return outcome(kernel, kind, precision, TARGETS[kind], tensors_of(kind), **options)


@pytest.mark.parametrize("kind", CALLS)
def test_fp32_gradients_are_those_of_finite_differences(kind):
    target, (_, options), tensors = TARGETS[kind], CALLS[kind], tensors_of(kind)
    y, *gradients = run(kind, Precision.FP32)
    gradient = sample(*y.shape, seed=9).double()  # as `outcome` sends it
    for i, tensor in enumerate(tensors):
        direction = sample(*tensor.shape, seed=7).double()
        ends = []
        for step in (1e-5, -1e-5):
            moved = [t.double() + step * direction if j == i else t.double() for j, t in enumerate(tensors)]
            ends.append((target(*moved, **options) * gradient).sum().item())
        slope = (ends[0] - ends[1]) / 2e-5
        assert (gradients[i].double() * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("kind", "precision"), [(k, p) for k, ps in PRECISIONS_BY_KIND.items() for p in ps])
def test_every_precision_approximates_fp32(kind, precision):
    for a, b in zip(run(kind, precision), run(kind, Precision.FP32), strict=True):
        assert ((a - b).norm() / b.norm()).item() <= LARGEST_ERROR[precision]


@pytest.mark.parametrize("kind", [k for k, ps in PRECISIONS_BY_KIND.items() if Precision.INT8 in ps])
def test_the_gradient_is_that_of_fp32_at_the_decoded_operands(kind):
    """Straight through: where BF16 holds the gradient exactly, nothing but the operands is rounded."""
    target, (_, options) = TARGETS[kind], CALLS[kind]
    leaves = [t.requires_grad_() for t in tensors_of(kind)]
    operands = arguments_of(kind, Precision.INT8, leaves)
    y = reference_kernel(kind, Precision.INT8)(target, "fp32", *operands, **options)
    got = torch.autograd.grad(y, leaves, torch.full_like(y, 0.5))
    decoded = [
        decode(o.encoded).requires_grad_() if isinstance(o, Operand) else o.detach().requires_grad_()
        for o in operands
    ]
    if kind == "embedding":  # what is decoded are the rows that it looks up
        decoded = [decode(encode(leaves[0], "int8_row")).requires_grad_()]
    plain = target(*decoded, **options)
    expected = torch.autograd.grad(plain, decoded, torch.full_like(plain, 0.5))
    assert torch.equal(y, plain)
    assert all(torch.equal(p, q) for p, q in zip(got, expected, strict=True))


def test_int8_gradients_are_those_of_the_equation():
    """dx = bf16(g) s_w W, dW = bf16(g)' s_x X, db = sum bf16(g), in float64."""
    x, w, b = (t.requires_grad_() for t in tensors_of("linear"))
    operands = [Operand(t, encode(t, "int8_row")) for t in (x, w)]
    y = reference_kernel("linear", Precision.INT8)(F.linear, "fp32", *operands, b)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    got = torch.autograd.grad(y, (x, w, b), g)
    rounded = g.bfloat16().double()
    codes = [o.encoded.data.double() * o.encoded.scale.double() for o in operands]
    for found, exact in zip(got, (rounded @ codes[1], rounded.t() @ codes[0], rounded.sum(0)), strict=True):
        assert ((found - exact).abs() <= 1e-6 * exact.abs().max()).all()


def test_rounding_to_a_mantissa():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    assert torch.equal(round_mantissa(x, MANTISSA_BITS["bf16"]), x.bfloat16().float())
    assert torch.equal(round_mantissa(x, MANTISSA_BITS["fp16"]), x.half().float())
    step = 2.0 ** (x.abs().log2().floor() - 10)
    assert ((round_mantissa(x, 10) - x).abs() <= step / 2).all()
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    assert torch.equal(round_mantissa(bad, 7).nan_to_num(1.0), bad.nan_to_num(1.0))


def test_combinations_that_do_not_exist():
    assert reference_kernel("conv2d", Precision.FP8) is None
    assert reference_kernel("softmax", Precision.INT8) is None

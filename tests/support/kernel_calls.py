"""A kernel called as a rewritten graph calls it, and how far its results are from another's."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from qsync.backend import Operand, encode, reference_kernel, select
from qsync.operators.precision import Precision, is_encoded
from qsync.operators.registry import operand_type


def look_up(table, places, **options):
    return F.embedding(places.to(table.device), table, **options)


def contract(left, right, equation):
    return torch.einsum(equation, left, right)


def transposed(input, *rest, **options):
    """The transposed convolution of as many dimensions as the input has."""
    return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[input.ndim - 3](
        input, *rest, **options
    )


def multiply_groups(rows, weights, offs):
    """The rows of each group by its weight."""
    groups = rows.tensor_split(offs[:-1].tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def recur(sequences, *weights):
    """One LSTM layer from zero states."""
    state = sequences.new_zeros(1, len(sequences), weights[1].shape[1])
    return torch.lstm(sequences, (state, state), weights, len(weights) > 2, 1, 0.0, True, False, True)[0]


# A call of every kind of product, operands first.
TARGETS = {
    "linear": F.linear,
    "addmm": torch.addmm,
    "conv2d": torch.conv2d,
    "conv1d": torch.conv1d,
    "conv3d": torch.conv3d,
    "conv_transpose": transposed,
    "matmul": torch.matmul,
    "baddbmm": torch.baddbmm,
    "attention": F.scaled_dot_product_attention,
    "embedding": look_up,
    "einsum": contract,
    "grouped_mm": multiply_groups,
    "bilinear": F.bilinear,
    "rnn": recur,
}


def sample(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def arguments_of(kind, precision, tensors):
    """Each operand in its type, encodings beside the values."""
    arguments = []
    for i, tensor in enumerate(tensors):
        type_name = operand_type(kind, i, Precision(precision))
        if is_encoded(type_name):
            tensor = Operand(tensor, encode(tensor, type_name))
        elif type_name == "bf16":
            tensor = tensor.to(torch.bfloat16)
        arguments.append(tensor)
    return arguments


def call(kernel, kind, precision, target, tensors, out_type="fp32", **options):
    """The kernel as a rewritten graph calls it."""
    return kernel(target, out_type, *arguments_of(kind, precision, tensors), **options)


def outcome(kernel, kind, precision, target, tensors, gradient=None, out_type="fp32", **options):
    """Result and gradients, with fresh leaves, so that two kernels see the same inputs."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(kernel, kind, precision, target, leaves, out_type, **options)
    if gradient is None:
        gradient = sample(*y.shape, seed=9)
    return (y.detach(), *torch.autograd.grad(y, leaves, gradient.to(y.dtype)))


def agreement_db(got, expected):
    """Signal to noise of `got` against `expected`, in decibels."""
    noise = (got.double() - expected.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


# Signal to noise against the reference, in decibels: (result, gradients). INT8 sums are exact, so results
# differ by FP32 rounding only. The gradients of int8_all are two independent stochastic roundings of the same
# gradient.
# A gradient that is zero in exact arithmetic (the softmax of one score) is the rounding of products, which
# processors order differently: two of less than `ZERO` agree. Samples are of size 1.
ZERO = 1e-5
LEAST_DB = {"int8": (110, 45), "int8_all": (110, 22), "fp16": (60, 50), "bf16": (40, 40)}


def assert_parity(kind, precision, target, tensors, bounds=None, **options):
    """The kernel that is chosen on CPUs agrees with the reference in result and gradients; its results."""
    torch.manual_seed(0)
    got = outcome(select("cpu").kernel(kind, precision), kind, precision, target, tensors, **options)
    expected = outcome(
        reference_kernel(kind, Precision(precision)), kind, precision, target, tensors, **options
    )
    bounds = bounds or LEAST_DB[precision]
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.numel():
            finite = b.isfinite()
            assert torch.equal(a.isfinite(), finite), f"tensor {i}"
            a, b = a[finite], b[finite]
            is_zero = max(a.double().norm(), b.double().norm()) < ZERO
            assert is_zero or agreement_db(a, b) >= bounds[min(i, 1)], f"tensor {i}"
    return got

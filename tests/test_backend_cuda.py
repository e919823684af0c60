"""The kernels of GPUs against the reference. What a GPU lacks is skipped with the backend's own reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from qsync.backend import Operand, encode, reference_kernel, select
from qsync.errors import UnsupportedError
from qsync.precision import Precision, is_encoded, operand_type

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CALLS = {
    "linear": (F.linear, lambda m, k, n: [(m, k), (n, k), (n,)], {}),
    "addmm": (torch.addmm, lambda m, k, n: [(n,), (m, k), (k, n)], {}),
    "matmul": (torch.matmul, lambda m, k, n: [(2, m, k), (2, k, n)], {}),
    "conv2d": (torch.conv2d, lambda m, k, n: [(2, k, 9, 7), (n, k, 3, 3), (n,)], {"padding": 1}),
    "conv1d": (torch.conv1d, lambda m, k, n: [(2, k, 9), (n, k, 3), (n,)], {"padding": 1}),
    "attention": (F.scaled_dot_product_attention, lambda m, k, n: [(1, 2, m, 16)] * 3, {}),
}
LEAST_DB = {
    "tf32": (50, 50),
    "bf16": (38, 35),
    "fp16": (50, 45),
    "fp8": (40, 25),
    "int8": (100, 45),
    "int8_all": (100, 22),
}


def outcome(kernel, kind, precision, target, tensors, options):
    leaves = [t.detach().requires_grad_() for t in tensors]
    arguments = []
    for i, leaf in enumerate(leaves):
        type_name = operand_type(kind, i, precision)
        if is_encoded(type_name):
            arguments.append(Operand(leaf, encode(leaf, type_name)))
        else:
            arguments.append(leaf.bfloat16() if type_name == "bf16" else leaf)
    y = kernel(target, "fp32", *arguments, **options)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).cuda()
    return (y.detach(), *torch.autograd.grad(y, leaves, gradient))


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "fp8", "int8", "int8_all"])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("sizes", [(64, 32, 48), (1, 8, 8), (17, 24, 40), (33, 37, 11), (3, 5, 1)])
def test_kernels_agree_with_the_reference(kind, precision, sizes):
    target, shapes, options = CALLS[kind]
    precision = Precision(precision)
    try:
        kernel = select("cuda").kernel(kind, precision)
    except UnsupportedError as error:
        pytest.skip(str(error))
    tensors = [
        torch.randn(shape, generator=torch.Generator().manual_seed(i)).cuda()
        for i, shape in enumerate(shapes(*sizes))
    ]
    got = outcome(kernel, kind, precision, target, tensors, options)
    expected = outcome(reference_kernel(kind, precision), kind, precision, target, tensors, options)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        noise, signal = ((t.double()).square().sum().item() for t in (a - b, b))
        least = (44, 38) if (kind, precision) == ("attention", "int8") else LEAST_DB[precision]  # P V in BF16
        assert noise == 0 or 10 * math.log10(signal / noise) >= least[min(i, 1)], f"tensor {i}"


def test_tf32_leaves_the_switches_as_they_were():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        kernel = select("cuda").kernel("linear", "tf32")
    except UnsupportedError as error:
        pytest.skip(str(error))
    x, w = (torch.randn(8, 8, device="cuda", requires_grad=True) for _ in range(2))
    kernel(F.linear, "fp32", x, w).sum().backward()
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_every_choice_on_this_gpu_has_a_reason():
    assert all(row["why"] for row in select("cuda").describe())

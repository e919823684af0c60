"""Norms of 16-bit values on GPUs, where torch takes no FP32 parameters beside them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qsync.backend.kernels.norms import norm
from qsync.runtime.rewriting import is_norm_on_gpu


def called(device):
    """The types of the values and parameters that torch's function gets."""
    with FakeTensorMode():  # of a GPU that this machine need not have
        x = torch.empty(4, 8, device=device, dtype=torch.bfloat16)
        weight, bias = torch.empty(8, device=device), torch.empty(8, device=device)
        found = []

        def target(input, shape, weight, bias=None, eps=1e-5):
            found.extend([input.dtype, weight.dtype, bias.dtype])
            return input

        norm(target, x, (8,), weight, bias=bias)
    return found


def test_on_a_gpu_parameters_come_in_the_type_of_the_values():
    assert called("cuda") == [torch.bfloat16] * 3


def test_on_a_cpu_they_stay_fp32():
    assert called("cpu") == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("kind", "carried", "device", "is_ours"),
    [
        ("layer_norm", "bf16", "cuda", True),
        ("group_norm", "bf16", "cuda", True),
        ("batch_norm", "bf16", "cuda", False),
        ("layer_norm", "fp32", "cuda", False),
        ("layer_norm", "bf16", "cpu", False),
    ],
)
def test_the_pass_takes_it_for_16_bit_values_on_gpus_alone(kind, carried, device, is_ours):
    with FakeTensorMode():
        value = torch.empty(2, 4, device=device)
    op, run = SimpleNamespace(kind=kind), SimpleNamespace(operands=(carried,))
    assert is_norm_on_gpu(op, run, SimpleNamespace(meta={"example_value": value})) is is_ours


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_a_gpu_s_norm_is_that_of_fp32_but_for_the_rounding(name):
    target, first = getattr(F, name), 4 if name == "group_norm" else (16,)
    x, weight = (torch.randn(*shape, device="cuda").bfloat16().float() for shape in ((8, 16), (16,)))
    y = norm(target, x.bfloat16(), first, weight.requires_grad_())
    y.sum().backward()
    assert y.dtype is torch.bfloat16 and weight.grad.dtype is torch.float32
    torch.testing.assert_close(y.float(), target(x, first, weight), rtol=2**-8, atol=2**-8)

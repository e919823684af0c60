"""Norms of 16-bit values on GPUs, where torch takes no FP32 parameters beside them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qsync.backend.kernels.norms import has_bias_alone, norm
from qsync.runtime.rewriting import is_norm_of_one_type


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


@pytest.mark.parametrize("target", [F.layer_norm, torch.layer_norm])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_layer_norm_with_a_bias_alone_has_a_backward(target, is_named):
    """torch's own refuses an FP32 bias beside BF16 values where there is no weight."""
    generator = torch.Generator().manual_seed(0)
    x, bias, gradient = (torch.randn(*shape, generator=generator) for shape in ((6, 16), (16,), (6, 16)))
    x, gradient = x.bfloat16(), gradient.bfloat16()

    def outcome(call, x, bias, gradient):
        leaves = [t.detach().requires_grad_() for t in (x, bias)]
        args, kwargs = (((16,),), {"bias": leaves[1]}) if is_named else (((16,), None, leaves[1], 1e-5), {})
        y = call(leaves[0], *args, **kwargs)
        return [y, *torch.autograd.grad(y, leaves, gradient)]

    got = outcome(lambda *a, **k: norm(target, *a, **k), x, bias, gradient)
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for one, other in zip(got, outcome(target, x.float(), bias, gradient.float()), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2**-7, atol=2**-7)


def test_a_bias_alone_is_found_in_every_spelling():
    x, shape, one = torch.ones(2, 4), (4,), torch.ones(4)
    alone = [((x, shape, None, one), {}), ((x, shape), {"bias": one}), ((x,), {"weight": None, "bias": one})]
    other = [
        ((x, shape, one, one), {}),
        ((x, shape), {}),
        ((x, shape, None, None), {}),
        ((x, shape, one), {}),
    ]
    assert [has_bias_alone(*call) for call in (*alone, *other)] == [True] * 3 + [False] * 4


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
    node = SimpleNamespace(meta={"example_value": value}, args=(value, (4,), value, value), kwargs={})
    assert is_norm_of_one_type(op, run, node) is is_ours


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

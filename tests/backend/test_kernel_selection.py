"""Choosing kernels: what is offered, why, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from qsync.backend import cutlass, encode
from qsync.backend.selection import kernel_candidates, kernel_selection
from qsync.backend.selection.kernel_candidates import Candidate, candidates, device_precisions
from qsync.backend.selection.kernel_selection import Kernels, select
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision


def test_the_backend_package_imports_no_torch():
    code = "import sys, qsync.backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_kernels_object_per_device_and_process():
    assert select("cpu") is select(torch.device("cpu"))


def test_a_trial_in_the_middle_of_a_forward_pass_saves_nothing_there():
    """Recomputation counts what forward saves, and the second time there is no trial."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        Kernels(torch.device("cpu")).kernel("linear", Precision.FP32)
    assert saved == []


def test_a_cpu_offers_what_it_multiplies():
    kernels = select("cpu")
    assert kernels.precisions() == (
        Precision.FP32,
        Precision.BF16,
        Precision.FP16,
        Precision.MXFP8,
        Precision.INT8,
        Precision.INT8_ALL,
    )
    assert kernels.sixteen_bit == "bf16"


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        ((7, 0), {"tf32", "bf16", "int8", "int8_all", "fp8", "mxfp8"}),
        ((7, 5), {"tf32", "bf16", "fp8", "mxfp8"}),
        ((8, 0), {"fp8", "mxfp8"}),
        ((8, 9), {"mxfp8"}),
        ((9, 0), {"mxfp8"}),
        ((10, 0), set()),
    ],
)
def test_a_gpu_offers_what_its_capability_has(monkeypatch, capability, missing):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    offered = device_precisions(torch.device("cuda", 0))
    assert set(Precision) - set(offered) == missing
    narrow = Kernels(torch.device("cuda", 0)).sixteen_bit
    assert narrow == (None if "bf16" in missing else "bf16")


def test_nothing_is_timed_before_it_is_asked_for():
    kernels = Kernels(torch.device("cpu"))
    assert kernels.choices == ()
    kernels.kernel("matmul", "bf16")
    assert {(c.kind, c.precision) for c in kernels.choices} == {("matmul", "bf16"), ("matmul", "fp32")}


def test_a_choice_says_why():
    choice = select("cpu").choice("linear", "int8")
    assert choice.kernel == "int_mm"
    assert choice.measured_s > 0
    assert choice.speedup == pytest.approx(
        select("cpu").choice("linear", "fp32").measured_s / choice.measured_s
    )
    assert dict(choice.rejected).keys() == {"reference"}
    assert "linear in int8: int_mm" in choice.why()


@pytest.mark.parametrize(
    ("kind", "precision", "reason"),
    [
        ("linear", "fp8", "no CPU multiplies FP8"),
        ("linear", "tf32", "tensor cores"),
        ("matmul", "int8_all", "qsync has none"),
        ("softmax", "fp16", "qsync has none"),
    ],
)
def test_a_missing_kernel_says_why_and_nothing_falls_back(kind, precision, reason):
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=reason):
            select("cpu").kernel(kind, precision)


def test_the_reference_is_there_for_who_asks():
    assert select("cpu").kernel("linear", "fp8", reference=True) is not None
    with pytest.raises(UnsupportedError, match="conv2d has no kernel in fp8"):
        select("cpu").kernel("conv2d", "fp8", reference=True)


def test_a_convolution_in_int8_needs_cutlass_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(cutlass, "kernel", lambda *_: (None, "CUTLASS products need nvcc"))
    with pytest.raises(
        UnsupportedError, match="no INT8 convolution on GPUs; cutlass: CUTLASS products need nvcc"
    ):
        Kernels(torch.device("cuda", 0)).kernel("conv2d", "int8")


def test_volta_compiles_nothing_for_int8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(cutlass, "kernel", pytest.fail)
    found = candidates("linear", Precision.INT8, torch.device("cuda", 0))
    assert [c.name for c in found] == ["int_mm", "cutlass"]
    assert all("needs compute capability 7.5" in c.reason for c in found)


def test_a_kernel_that_computes_something_else_is_rejected(monkeypatch):
    def wrong(target, out_type, x, weight, bias=None):
        return torch.nn.functional.linear(x.value, weight.value * 1.1, bias)

    def broken(target, out_type, *args):
        raise RuntimeError("no such instruction\nand a long trace")

    found = (Candidate("wrong", wrong), Candidate("broken", broken), Candidate("absent", None, "not built"))
    monkeypatch.setattr(kernel_selection, "candidates", lambda *_: found)
    with pytest.raises(
        UnsupportedError, match=r"wrong: wrong: \d+ dB.*broken: fails here: no such .*absent: not"
    ):
        Kernels(torch.device("cpu"))._choose("linear", Precision.INT8)


def test_fp32_is_torchs_where_our_kernel_is_wrong_or_bits_are_to_be_torchs(monkeypatch):
    def wrong(target, out_type, x, weight, bias):
        return target(x, 1.1 * weight, bias)

    assert select("cpu").choice("linear", "fp32").kernel == "MKL or oneDNN by shape"
    assert select("cpu", bitwise=True).choice("linear", "fp32").kernel == "torch"
    monkeypatch.setitem(kernel_candidates._OF_DEVICE["cpu"], ("linear", Precision.FP32), ("wrong", wrong))
    assert Kernels(torch.device("cpu")).choice("linear", "fp32").kernel == "torch"


def test_choosing_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Kernels(torch.device("cpu")).kernel("linear", "int8_all")
    assert torch.equal(torch.get_rng_state(), before)


def test_choosing_works_where_no_gradients_are_recorded():
    with torch.no_grad():
        assert Kernels(torch.device("cpu")).kernel("linear", "int8") is not None


def test_casts():
    kernels = select("cpu")
    x = torch.randn(4, 8, requires_grad=True)
    y = kernels.cast(x, "bf16")
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    encoded = kernels.cast(x, "int8_row")
    assert torch.equal(encoded.data, encode(x, "int8_row").data)
    with pytest.raises(UnsupportedError, match="no cast to 'int64'"):
        kernels.cast(x, "int64")


def test_devices_that_are_not_there():
    with pytest.raises(UnsupportedError, match="no kernels for 'xpu'"):
        select("xpu")
    with pytest.raises(UnsupportedError, match="on the meta device, without weights: call model.to_empty"):
        select("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="sees no CUDA device"):
            select("cuda")

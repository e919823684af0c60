"""Which precisions a profile takes by default: not those that a processor emulates."""

from __future__ import annotations

import pytest
import torch

from qsync.backend import precisions_that_pay
from qsync.backend.devices.device_detection import detect_class
from qsync.backend.precisions_that_pay import (
    default_precisions,
    emulated_precisions,
    emulation_note,
    precisions_to_profile,
    sixteen_bits_pay,
)
from qsync.errors import FormatError
from qsync.operators.precision import Precision
from qsync.records.cluster import DeviceClass

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
INT8, INT8_ALL = Precision.INT8, Precision.INT8_ALL
EVERYWHERE = {FP16, Precision.MXFP8}  # on every CPU


def taking(monkeypatch: pytest.MonkeyPatch, **times_fp32: float) -> None:
    """Let products of these types take so many times the time of one in FP32."""

    def chosen(key, runs):
        type_name, _, than, *_ = key[0].split()
        low, high = (run() for run in runs)
        assert low.dtype == {"bf16": torch.bfloat16, "int8": torch.int32}[type_name]
        assert high.dtype == torch.float32 and low.shape == high.shape
        return 0 if times_fp32[type_name] < int(than) else 1

    monkeypatch.setattr(precisions_that_pay, "choose", chosen)


@pytest.mark.parametrize(
    ("bf16", "int8", "emulated"),
    [
        (0.5, 0.3, set()),
        (1.9, 0.3, set()),  # AVX-512 without AMX
        (16.0, 0.5, {BF16, INT8}),  # `int8` multiplies backward in BF16
        (16.0, 25.0, {BF16, INT8, INT8_ALL}),  # AVX2
        (0.5, 25.0, {INT8, INT8_ALL}),
    ],
)
def test_what_takes_three_times_as_long_as_fp32_is_profiled_on_request_only(
    monkeypatch, bf16, int8, emulated
):
    taking(monkeypatch, bf16=bf16, int8=int8)
    assert emulated_precisions(CPU) == emulated | EVERYWHERE
    own = detect_class(CPU)
    left = {FP32, BF16, INT8} - emulated
    assert set(default_precisions(own)) == left
    assert set(default_precisions(own, {BF16, FP16})) == left | {BF16, FP16}
    assert precisions_to_profile(own, torch.nn.Linear(2, 2), ["int8", "bf16"]) == (BF16, INT8)
    assert sixteen_bits_pay(CPU) is (bf16 < 1)
    note = emulation_note(CPU)
    assert all(str(p) in note for p in emulated | EVERYWHERE) if emulated else note == ""


def test_a_base_is_profiled_though_it_is_emulated(monkeypatch):
    taking(monkeypatch, bf16=16.0, int8=25.0)
    own, in_fp32, in_bf16 = detect_class(CPU), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16()
    assert set(precisions_to_profile(own, in_fp32, None, BF16)) == {FP32, BF16}
    assert set(precisions_to_profile(own, in_fp32, None, FP16)) == {FP32, BF16}  # FP16's stand-in
    assert set(precisions_to_profile(own, in_fp32, None, FP32)) == {FP32}
    assert set(precisions_to_profile(own, in_bf16)) == {FP32, BF16}


def test_the_base_and_fp32_are_profiled_though_others_are_named():
    own, model = detect_class(CPU), torch.nn.Linear(2, 2)
    assert precisions_to_profile(own, model, ["int8"], BF16) == (FP32, BF16, INT8)
    assert precisions_to_profile(own, model, ["bf16"], FP32) == (FP32, BF16)
    with pytest.raises(FormatError, match="precisions is empty; name at least one"):
        precisions_to_profile(own, model, [])


def test_the_first_product_is_the_same_in_both_types(monkeypatch):
    def chosen(key, runs):
        low, high = (run() for run in runs)
        if key[0].startswith("bf16"):
            assert (low.float() - high).norm() < 0.01 * high.norm()
        return 0

    monkeypatch.setattr(precisions_that_pay, "choose", chosen)
    assert emulated_precisions(CPU) == EVERYWHERE and sixteen_bits_pay(CPU)


def test_a_gpu_emulates_nothing():
    assert emulated_precisions(CUDA) == frozenset() and emulation_note(CUDA) == "" and sixteen_bits_pay(CUDA)
    gpu = DeviceClass("gpu", "cuda", 1, 2**34, (FP32, FP16, INT8, INT8_ALL))
    assert default_precisions(gpu) == (FP32, FP16, INT8)

"""Measured peaks: which types have one, and what it is for a precision that multiplies in two types."""

from __future__ import annotations

import pytest
import torch

from qsync.backend import measure_peaks

CPU = torch.device("cpu")
PEAKS = {"fp32": 1e11, "bf16": 2e11, "fp16": 1e10, "int8": 4e11}


def test_a_device_has_a_peak_for_every_type_that_it_multiplies(monkeypatch):
    monkeypatch.setattr(measure_peaks, "_SQUARE", {"cpu": 64})
    monkeypatch.setattr(measure_peaks, "_TIMED_S", 0.0)
    found = measure_peaks.measured_peaks(CPU)
    assert set(found) == {"fp32", "bf16", "fp16", "int8"}
    assert all(rate > 0 for rate in found.values())


def test_the_products_compute_products():
    for name, (operations, run) in measure_peaks.products(CPU, 32, ["fp32", "bf16", "fp16", "int8"]).items():
        result = run()
        assert result.numel() > 0, name
        assert operations == (2 * 32**3 if "conv" not in name else 2 * 16 * 8 * 16 * 16 * 8 * 9)


def test_the_best_product_is_the_peak():
    assert measure_peaks.best_by_type({"fp32 mm": 1.0, "fp32 conv": 3.0, "int8 mm": 2.0}) == {
        "fp32": 3.0,
        "int8": 2.0,
    }


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp32", 1e11),
        ("bf16", 2e11),
        ("int8_all", 4e11),
        ("int8", 2.4e11),
        ("fp8", None),
        ("tf32", None),
    ],
)
def test_the_peak_of_a_precision(precision, expected):
    found = measure_peaks.peak_of("linear", precision, "bf16", PEAKS)
    assert found == (None if expected is None else pytest.approx(expected))


def test_attention_in_int8_multiplies_once_of_six_times_in_it():
    expected = 6 / (1 / PEAKS["int8"] + 5 / PEAKS["bf16"])
    assert measure_peaks.peak_of("attention", "int8", "bf16", PEAKS) == pytest.approx(expected)

"""Data sheets: what devices that are not here could do at best, by name, in cluster files."""

from __future__ import annotations

import pytest

from qsync.errors import FormatError
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.datasheets import DATASHEETS, DataSheet, datasheet

LINK = "[link]\nlatency_s = 1e-5\nbytes_per_s = 1e10\n"


def cluster(tmp_path, table: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[[classes]]\nname = "infer"\ncount = 2\n{table}\n{LINK}')
    return Cluster.load(path)


def test_every_device_has_what_its_tensor_cores_multiply():
    has = {name: set(sheet.precisions) for name, sheet in DATASHEETS.items()}
    assert set(has) >= {"P100", "T4", "V100", "L4", "A10", "A10G", "A100", "H100", "H200", "B200", "L40S"}
    assert Precision.INT8 not in has["V100"] and Precision.FP16 in has["V100"]
    assert Precision.BF16 not in has["T4"] and {Precision.INT8, Precision.FP16} <= has["T4"]
    for name, sheet in DATASHEETS.items():
        assert (Precision.BF16 in has[name]) == (sheet.capability >= (8, 0))
        assert (Precision.FP8 in has[name]) == (sheet.capability >= (8, 9))
        assert (Precision.INT8 in has[name]) == (sheet.capability >= (7, 5))
        assert sheet.source.startswith("NVIDIA: ")
        assert name in sheet.source or "white paper" in sheet.source or "Blackwell" in sheet.source


def test_peaks_are_dense():
    """INT8 is twice 16 bits, which is twice TF32: sparsity would double some and not others."""
    for name, sheet in DATASHEETS.items():
        rates = sheet.flops_per_s
        if "int8" in rates:  # GeForce cards sum in FP32 at half the rate
            times = 4 if name.startswith("RTX") else 2
            assert rates["int8"] == pytest.approx(times * rates["fp16"], rel=0.02)
        if "tf32" in rates:
            assert rates["fp16"] == pytest.approx(2 * rates["tf32"], rel=0.03)
        assert rates.get("bf16", rates["fp16"]) == rates["fp16"], name


def test_an_unknown_name_is_told_the_nearest():
    assert datasheet("t4") is DATASHEETS["T4"]
    with pytest.raises(
        FormatError, match=r"no data sheet 'H1OO' \(nearest: 'H100'\); choose one of T4, P100"
    ):
        datasheet("H1OO")


def test_a_sheet_survives_json():
    sheet = datasheet("L4")
    assert DataSheet.from_json(sheet.to_json()) == sheet


def test_a_class_of_a_cluster_file_takes_memory_and_precisions_from_its_sheet(tmp_path):
    found = cluster(tmp_path, 'datasheet = "t4"')["infer"]
    assert (found.device, found.memory_bytes, found.datasheet) == ("cuda", 16 * 10**9, "T4")
    assert set(found.precisions) == {Precision.FP32, Precision.FP16, Precision.INT8}
    own = cluster(tmp_path, 'datasheet = "T4"\nmemory_bytes = 5\nprecisions = ["fp32", "int8_all"]')["infer"]
    assert (own.memory_bytes, own.precisions) == (5, (Precision.FP32, Precision.INT8_ALL))
    again = Cluster.from_json({"classes": [cluster(tmp_path, 'datasheet = "A10"').to_json()["classes"][0]],
                               "link": {"latency_s": 0.0, "bytes_per_s": 1.0}})  # fmt: skip
    assert again["infer"].datasheet == "A10"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('datasheet = "A1000"', r"classes, entry 1: there is no data sheet 'A1000' \(nearest: 'A100'\)"),
        (
            'datasheet = "V100"\nprecisions = ["fp32", "int8"]',
            "V100 does not support int8; choose from fp32, fp16",
        ),
        ("datasheet = 4", "entry 1, datasheet: expected `str | null`, found 4"),
    ],
)
def test_a_sheet_that_cannot_be_used_is_one_sentence(tmp_path, table, message):
    with pytest.raises(FormatError, match=message):
        cluster(tmp_path, table)

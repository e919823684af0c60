"""What doctor finds on this machine, and the table it shows."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from qsync import backend
from qsync.backend import build_ahead, cuda_build
from qsync.backend.casts import compiled_casts as compiled
from qsync.backend.cutlass import compiled_products
from qsync.backend.measure_peaks import peak_of
from qsync.commands import device_report, doctor_tables
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND


@pytest.fixture(scope="module")
def found():
    return device_report.examine()


def test_every_product_and_precision_has_one_row(found):
    cpu = found["devices"][0]
    rows = [(row["kind"], row["precision"]) for row in cpu["kernels"]]
    assert rows == [(kind, str(p)) for kind in PRECISIONS_BY_KIND for p in Precision]


def test_a_missing_kernel_has_a_reason_and_the_others_a_time_and_a_rate(found):
    peaks = found["devices"][0]["peak_flops_per_s"]
    for row in found["devices"][0]["kernels"]:
        if row["kernel"] is None:
            assert row["note"]
            continue
        assert row["measured_s"] > 0
        assert ("slower than FP32 here" in (row["note"] or "")) == (row["speedup"] < 1)
        if row["flops"]:
            assert row["flops_per_s"] == pytest.approx(row["flops"] / row["measured_s"])
            peak = peak_of(row["kind"], row["precision"], "bf16", peaks)
            assert row["peak_flops_per_s"] == peak
            assert (peak is None) == (row["precision"] == "mxfp8")  # a CPU multiplies no FP8
            assert row["share_of_peak"] == (peak and row["flops_per_s"] / peak)


def test_the_rate_counts_three_products_of_two_operations_per_multiply_add(found):
    flops = {row["kind"]: row["flops"] for row in found["devices"][0]["kernels"] if row["kernel"]}
    assert flops["linear"] == flops["addmm"] == 3 * 2 * 512**3
    assert flops["conv2d"] == 3 * 2 * 8 * 16 * 16 * 32 * 32 * 9
    assert flops["attention"] == 3 * 2 * 2 * (2 * 4 * 256 * 256 * 32)


def test_what_nobody_wrote_is_listed_with_the_reason(found):
    rows = {(row["kind"], row["precision"]): row for row in found["devices"][0]["kernels"]}
    assert "no convolution in FP8" in rows["conv2d", "fp8"]["note"]
    assert "forward only" in rows["conv1d", "int8_all"]["why"]


def test_fp32_is_the_measure_of_the_others(found):
    rows = [row for row in found["devices"][0]["kernels"] if row["precision"] == "fp32"]
    assert all(row["speedup"] == 1 for row in rows)


def test_a_kernel_that_was_passed_over_is_named():
    row = {
        "kind": "linear",
        "precision": "int8",
        "kernel": "a",
        "speedup": 2.0,
        "rejected": {"b": "takes 9 ms"},
    }
    assert device_report._note({**row, "why": None}, torch.device("cpu")) == "not b: takes 9 ms"


def page_of(*shown):
    page = io.StringIO()
    for item in shown:
        Console(file=page, width=100).print(item, highlight=False)
    return page.getvalue().splitlines()


def test_the_tables_are_read_in_a_hundred_columns(found):
    cpu = found["devices"][0]
    lines = page_of(
        doctor_tables.kernels_table(cpu), *doctor_tables.remarks(cpu), doctor_tables.reasons_table(cpu)
    )
    assert all(len(line) <= 100 for line in lines)


def test_a_kernel_takes_one_line_and_a_reason_is_told_once(found):
    cpu = found["devices"][0]
    available = [row for row in cpu["kernels"] if row["kernel"] is not None]
    title_headings_and_edges = 5
    assert len(page_of(doctor_tables.kernels_table(cpu))) == len(available) + title_headings_and_edges
    _, products, why = (column.cells for column in doctor_tables.reasons_table(cpu).columns)
    told = list(zip(products, why, strict=True))
    assert len(set(told)) == len(told)
    assert len(told) < sum(row["kernel"] is None for row in cpu["kernels"])


def test_long_reasons_wrap_between_words(found):
    reason = "/usr/local/cuda-13/bin/nvcc no longer compiles for sm_70: pip install another; " * 2
    rows = [
        {**row, "note": reason, "rejected": {"cutlass": reason}} for row in found["devices"][0]["kernels"]
    ]
    lines = page_of(doctor_tables.reasons_table({**found["devices"][0], "kernels": rows}))
    assert all(len(line) <= 100 for line in lines)
    words = " ".join(lines).split()
    assert words.count("/usr/local/cuda-13/bin/nvcc") == words.count("sm_70:") >= 2 * len(Precision)


def test_the_peaks_and_their_mix_are_said(found):
    said = " ".join(doctor_tables.remarks(found["devices"][0]))
    assert "int8 " in said and "3 / (1 / int8 + 2 / bf16)" in said and "one thread" in said


def test_the_casts_are_compiled_or_the_reason_is_said(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    monkeypatch.setattr(compiled, "note", lambda _: "casts run in plain torch: TVM is not installed")
    assert device_report.build_state(cpu) == ["casts run in plain torch: TVM is not installed"]
    monkeypatch.setattr(compiled, "note", lambda _: None)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    processor = device_report.machine()["processor"]
    assert device_report.build_state(cpu) == [
        f"casts: compiled for {processor}, cached in {tmp_path / 'kernels'}"
    ]


def test_a_gpu_says_which_casts_and_cutlass_products_are_built(monkeypatch):
    def unavailable(architecture, families):
        return "nvcc failed" if "int8_conv" in families else None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(compiled_products, "unavailable", unavailable)
    monkeypatch.setattr(compiled, "note", lambda architecture: None)
    casts, products = device_report.build_state(torch.device("cuda", 0))
    assert casts.startswith("casts: compiled for sm_75, cached in ")
    assert products.startswith(
        "CUTLASS products: int8_gemm, fp16_gemm, fp16_conv built for sm_75, cached in "
    )
    assert products.endswith("; int8_conv: nvcc failed")


def test_the_number_of_threads_is_put_back(monkeypatch):
    seen = []
    kernels = backend.select("cpu")

    def observed(value):
        seen.append(torch.get_num_threads())
        return value

    rows = kernels.describe()
    monkeypatch.setattr(type(kernels), "describe", lambda self: observed(rows))
    monkeypatch.setattr(device_report, "measured_peaks", lambda device: observed({}))
    before = torch.get_num_threads()
    device_report.describe(torch.device("cpu"))
    assert seen == [1, 1]
    assert torch.get_num_threads() == before


def test_an_untested_torch_is_noted(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert any("2.9.1" in text and "2.11 to 2.14" in text for text in device_report.notes())


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_the_command_prints_what_was_found(found, arguments, command, monkeypatch):
    monkeypatch.setattr(device_report, "examine", lambda: found)
    code, out, _ = command(*arguments)
    assert code == 0
    if "--json" in arguments:
        assert json.loads(out) == found
    else:
        assert f"torch {torch.__version__}" in out and "linear" in out


# Half a minute of compilers. Quick: what prints above, that compiling is said on stderr with the cache.
@pytest.mark.deep
def test_json_is_json_where_nothing_is_compiled_yet(tmp_path):
    """What is compiled on first use is said on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "qsync.commands.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "QSYNC_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["devices"][0]["build"][0].startswith("casts")
    assert "compiling" in done.stderr


def test_kernels_are_compiled_ahead_for_cards_that_are_elsewhere(tmp_path, command, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_build, "FAMILIES", ("fp16_gemm",))
    made = []
    monkeypatch.setattr(cuda_build, "library", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(
        compiled, "note", lambda architecture=None: None if architecture == "75" else "no TVM"
    )
    code, out, _ = command("doctor", "--build", "--architecture", "7.5", "--json")
    rows = json.loads(out)
    assert [(row["library"], row["device"]) for row in rows] == [
        ("casts", "cpu"), ("casts", "sm_75"), ("fp16_gemm", "sm_75"),
    ]  # fmt: skip
    assert rows[0]["why_not"] == "no TVM" and "why_not" not in rows[1] and made == [("75", ["fp16_gemm"])]
    assert code == 1  # one could not be built


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--build", "--architecture", "sm_6x"], "'sm_6x' is not a GPU architecture"),
        (["--build", "--architecture", "6.1"], "'6.1' is not a GPU architecture"),
        (["--architecture", "75"], "has no effect without --build; add --build"),
    ],
)
def test_architectures_that_are_none_are_refused(options, said, command):
    code, _, err = command("doctor", *options)
    assert code == 2 and said in err


def test_an_architecture_is_built_what_it_has_tensor_cores_for(monkeypatch):
    monkeypatch.setattr(build_ahead.compiled_casts, "note", lambda architecture=None: None)
    monkeypatch.setattr(cuda_build, "library", lambda architecture, families: None)
    for architecture, families in (("70", ["fp16_gemm", "fp16_conv"]), ("75", list(cuda_build.FAMILIES))):
        built = list(build_ahead.build([architecture]))
        assert not any("why_not" in row for row in built)
        assert [row["library"] for row in built if row["library"] != "casts"] == families


# Half a minute of compilers. What is built is checked above, that it is found with the cache, and that it
# compiles for one architecture with the products.
@pytest.mark.deep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
@pytest.mark.timeout(900)
def test_what_is_compiled_ahead_is_found_by_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_build, "FAMILIES", ("fp16_gemm",))
    done = {(row["library"], row["device"]): row for row in build_ahead.build(["80"])}
    assert not any("why_not" in row for row in done.values()), done
    again = list(build_ahead.build(["80"]))
    (found,) = [row for row in again if row["library"] == "fp16_gemm"]
    assert found["seconds"] < done[found["library"], found["device"]]["seconds"] / 2
    assert compiled_products.unavailable("80", ("fp16_gemm",)) is None

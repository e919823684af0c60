"""What doctor finds on this machine, and the table it shows."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from rich.console import Console

from qsync import backend, cli, doctors
from qsync.precision import PRECISIONS_BY_KIND


@pytest.fixture(scope="module")
def found():
    return doctors.examine()


def test_every_product_and_precision_has_one_row(found):
    cpu = found["devices"][0]
    rows = [(row["kind"], row["precision"]) for row in cpu["kernels"]]
    assert rows == [(kind, str(p)) for kind, precisions in PRECISIONS_BY_KIND.items() for p in precisions]


def test_a_missing_kernel_has_a_reason_and_the_others_a_time(found):
    for row in found["devices"][0]["kernels"]:
        if row["kernel"] is None:
            assert row["note"]
        else:
            assert row["measured_s"] > 0
            assert ("slower than FP32 here" in (row["note"] or "")) == (row["speedup"] < 1)


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
    assert doctors._note({**row, "why": None}, torch.device("cpu")) == "not b: takes 9 ms"


def test_the_table_is_read_in_a_hundred_columns(found):
    page = io.StringIO()
    Console(file=page, width=100).print(doctors.table(found["devices"][0]))
    lines = page.getvalue().splitlines()
    assert len(lines) <= 45
    assert all(len(line) <= 100 for line in lines)


def test_the_number_of_threads_is_put_back(monkeypatch):
    seen = []
    kernels = backend.select("cpu")
    monkeypatch.setattr(type(kernels), "describe", lambda self: seen.append(torch.get_num_threads()) or [])
    before = torch.get_num_threads()
    doctors.describe(torch.device("cpu"))
    assert seen == [1]
    assert torch.get_num_threads() == before


def test_an_untested_torch_is_noted(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert any("2.9.1" in text and "2.11 to 2.13" in text for text in doctors.notes())


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_the_command_prints_what_was_found(found, arguments, monkeypatch, capsys):
    monkeypatch.setattr(doctors, "examine", lambda: found)
    monkeypatch.setattr(sys, "argv", ["qsync", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    if "--json" in arguments:
        assert json.loads(out) == found
    else:
        assert f"torch {torch.__version__}" in out and "linear" in out

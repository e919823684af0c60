"""A machine's fingerprint: what is measured of small models, and what a file may hold."""

from __future__ import annotations

import getpass
import json
import math
import mmap
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import qsync
from qsync import Precision, api
from qsync.commands import doctor, machine_report
from qsync.errors import FormatError
from qsync.fingerprint import in_step, measure
from qsync.fingerprint.in_step import Steps, gaps_of
from qsync.fingerprint.small_models import SMALL_MODELS, loss_of_targets, made
from qsync.predictor.profiling.clocks import FaultClock
from qsync.records.fingerprint import Fingerprint, Gap, SmallModel
from qsync.runtime import choosers

GAP = Gap("bf16", "linear of 4x8, 8x8", 2, 3e-3, 2e-3, {"layout": 1e-3, "caches": -2e-4, "pages": 1e-4})


@pytest.fixture
def one_round(monkeypatch):
    monkeypatch.setattr(in_step, "_ROUNDS", 1)
    monkeypatch.setattr(in_step, "_EVICTING_BYTES", 2**16)


@pytest.mark.parametrize("name", [*SMALL_MODELS])
def test_small_models_train_on_their_batches(name):
    model, batch = made(name, 24)
    again, _ = made(name, 24)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    loss = loss_of_targets(model, batch)
    assert float(loss.detach()) == pytest.approx(math.log(1024), rel=0.1)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_operators_of_a_step_stand_beside_themselves_alone(one_round):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(256, 64)
    loss = api.loss_of(model, x, lambda model, batch: model(batch).square().mean())
    with api.running(model, loss, dynamic=False) as program:
        steps = Steps(program, loss, torch.optim.SGD(model.parameters()))
        first, second, third = sorted(
            gaps_of(steps, choosers.uniform(Precision.FP32)), key=lambda gap: gap.operators
        )
    assert [gap.operators for gap in (first, second, third)] == [
        "linear + relu of 256x64, 64x64", "linear of 256x64, 32x64", "linear of 256x64, 64x64",
    ]  # fmt: skip
    for gap in (first, second, third):
        assert gap.precision == "fp32" and gap.count == 1 and gap.in_step_s > 0.0 < gap.alone_s
        assert set(gap.causes) == {"layout", "caches", "pages", "clock"}


def test_casts_of_what_operators_read_count_with_them(one_round):
    model, x = nn.Sequential(nn.Linear(48, 32)), torch.randn(64, 48)
    loss = api.loss_of(model, x, lambda model, batch: model(batch).float().square().mean())
    with api.running(model, loss, dynamic=False) as program:
        Steps(program, loss, torch.optim.SGD(model.parameters())).begin(choosers.uniform(Precision.BF16))
        (lowered,) = program.lowered
    keys = in_step._keys(lowered, ["0"])
    assert keys == {"0", ("input:0", "bf16"), ("0.weight", "bf16"), ("0.bias", "bf16")}


def test_a_gap_is_explained_by_what_its_causes_make_up():
    assert GAP.ratio == pytest.approx(1.5) and GAP.explained == pytest.approx(0.9)


def test_fresh_pages_are_counted_and_touched_ones_are_not():
    clock, fresh = FaultClock(), mmap.mmap(-1, 2**24)
    fresh.madvise(mmap.MADV_NOHUGEPAGE)
    pages = torch.frombuffer(fresh, dtype=torch.float32)
    begun = clock.now()
    pages.fill_(1.0)
    touched = clock.now()
    pages.fill_(2.0)
    assert clock.seconds(begun, touched) > 1000 > clock.seconds(touched, clock.now())


def test_a_model_is_measured_in_one_turn_where_time_is_up():
    found = measure.measure_model("gpt", time.perf_counter(), lambda text: None, width=24)
    assert (
        found.name == "gpt" and found.gaps == () and len(found.step_errors) == len(found.memory_errors) == 2
    )
    assert all(abs(error) < 0.05 for error in found.memory_errors)
    assert "fp32" in found.step_s and all(seconds > 0.0 for seconds in found.step_s.values())
    for mode, of in found.chosen.items():
        assert set(found.why[mode]) >= {op for op, precision in of.items() if precision != mode}


def test_no_text_names_a_user_a_host_or_a_path():
    home, host = str(Path.home()), socket.gethostname()
    text = machine_report.impersonal(f"g++ failed: {home}/.cache/x y/casts.cc on {host}; takes 0.5 GFLOP/s")
    assert text == "g++ failed: ... y/casts.cc on ...; takes 0.5 GFLOP/s"
    assert machine_report.impersonal("no kernel (nvcc: '/opt/cuda/bin/nvcc')") == "no kernel (nvcc: '...')"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--report", "."], "--report . is a folder; name a file in it"),
        (["--report", "machine.json", "--build"], "--build times nothing"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_at_once(arguments, said, command):
    code, _, err = command("doctor", *arguments)
    assert code == 2 and said in err


def test_a_report_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupted():
        assert not [*tmp_path.iterdir()]
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_report, "examine", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor.doctor(report=tmp_path / "machine.json")
    assert not [*tmp_path.iterdir()]


# Kernels of this machine are timed, and three small models measured: the pieces have tests above.
@pytest.mark.deep
@pytest.mark.slow
def test_a_report_is_written_and_read(tmp_path, monkeypatch, command, one_round):
    monkeypatch.setattr(measure, "_WIDTH", 24)
    file = tmp_path / "machine.json"
    code, out, err = command("doctor", "--report", str(file))
    assert code == 0, err
    assert f"written to {file}" in out and [*tmp_path.iterdir()] == [file]
    text, found = file.read_text(), Fingerprint.load(file)
    for private in (str(Path.home()), socket.gethostname(), getpass.getuser(), str(tmp_path)):
        assert f'{private}"' not in text and f"{private}/" not in text
    assert [model.name for model in found.models] == [*SMALL_MODELS] and found.versions["qsync"]
    assert all(row.kernel or row.why for row in found.kernels)
    assert found.copied_bytes_per_s > 1e8 and found.peak_flops_per_s["fp32"] > 1e8


def fingerprint(**changes) -> Fingerprint:
    model = SmallModel("gpt", {"fp32": 0.1}, (0.01,), (0.0,), {}, {}, (GAP,))
    facts = {
        "processor": "A", "instruction_sets": ("AVX2",), "gpus": (), "cores": 2, "memory_bytes": 2**30,
        "versions": {"qsync": qsync.__version__}, "load_average": 0.5, "seconds": 60.0,
        "peak_flops_per_s": {"fp32": 1e11}, "copied_bytes_per_s": 1e10, "kernels": (), "models": (model,),
    }  # fmt: skip
    return Fingerprint(**{**facts, **changes})


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = fingerprint().save(tmp_path / "a.json")
    assert Fingerprint.load(path) == fingerprint()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "plan"}, "expected a fingerprint file, found 'plan'"),
        ({"version": 2}, "this qsync reads version 1"),
        ({"cores": 0}, "cores"),
        ({"host": "ada"}, "has an unknown field 'host'"),
    ],
)
def test_what_is_no_fingerprint_is_refused(tmp_path, change, said):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**fingerprint().to_json(), **change}))
    with pytest.raises(FormatError, match=said) as raised:
        Fingerprint.load(path)
    assert str(path) in str(raised.value)

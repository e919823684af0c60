"""The evidence about GPUs: a dry run of every piece on a CPU, deadlines, reasons, and cut runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import torch

from qsync.experiments.gpu import __main__ as gpu
from qsync.experiments.gpu import pieces as gpu_pieces
from qsync.experiments.gpu import report
from qsync.experiments.gpu.commands import run_within
from qsync.experiments.gpu.pieces import pieces
from qsync.experiments.harness import Experiment

DRY = ("--device", "cpu", "--tiny", "--minutes", "30")
GROUPS = list(dict.fromkeys(piece.group for piece in pieces(Path("out"), "cpu", True)))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qsync.experiments.gpu", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=[pytest.mark.dist] * (g in ("ranks", "demo"))) for g in GROUPS]
)
def test_a_dry_run_goes_through_every_piece(group, tmp_path):
    done = run(tmp_path, *DRY, "--only", group)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "figures.json").read_text())
    assert content["measured"] == "a dry run on a CPU: no figure is of a GPU"
    wanted = [piece.key for piece in pieces(tmp_path, "cpu", True) if piece.group == group]
    logs = {log.name: log.read_text()[-2000:] for log in (tmp_path / "logs").iterdir()}
    for key in wanted:
        found = content["pieces"][key]
        assert "result" in found, (found, logs)
        assert not isinstance(found["result"].get("failed"), str), found
    assert run(tmp_path, *DRY, "--only", group).returncode == 0  # from what is kept
    assert json.loads((tmp_path / "figures.json").read_text())["pieces"] == content["pieces"]


def test_the_tests_that_need_a_gpu_are_found():
    assert {file.name for file in gpu_pieces.tests()} >= {"test_cuda.py", "test_cutlass.py", "test_parity.py"}


@without_gpu
def test_without_a_gpu_one_sentence_says_what_to_do(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "reaches no GPU" in done.stderr and "--device cpu" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--device", "tpu"), "cuda or cpu"), ((*DRY, "--only", "nothing"), "there is no group")],
)
def test_bad_options_are_refused(options, said, tmp_path):
    done = run(tmp_path, *options)
    assert done.returncode == 2 and said in done.stderr


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    log = tmp_path / "log.txt"
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    ended = run_within([sys.executable, "-c", code], 3.0, log)
    assert ended.cut and "cut after 3 s" in (ended.why_not or "")
    child = int(log.read_text())
    end = time.monotonic() + 30
    while not gone(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert gone(child)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('the card is gone')", "the card is gone (exit code 1"),
        ("import os; os.abort()", "it printed nothing (signal 6"),
        (
            "print('CUDA out of memory. Tried'); print('more'); raise SystemExit(3)",
            "CUDA out of memory. Tried",
        ),
    ],
)
def test_a_failure_has_its_reason(code, said, tmp_path):
    ended = run_within([sys.executable, "-c", code], 60.0, tmp_path / "log.txt")
    assert not ended.cut and said in (ended.why_not or "")
    assert run_within([sys.executable, "-c", "print(1)"], 60.0, tmp_path / "log.txt").why_not is None


def test_pieces_without_a_result_leave_the_rest_and_are_tried_again(tmp_path):
    experiment = Experiment("gpu", tmp_path, settings={})
    first, *_ = pieces(tmp_path, "cpu", True)
    broken = type(first)("memory", "broken", (sys.executable, "-c", "exit(1)"), 60.0, tmp_path / "no.json")
    writes = f"import pathlib; pathlib.Path({str(tmp_path / 'made.json')!r}).write_text('{{\"a\": 1}}')"
    good = type(first)("memory", "good", (sys.executable, "-c", writes), 60.0, tmp_path / "made.json")
    end = time.monotonic() + 600
    assert "failed" in gpu._result(experiment, broken, end)
    assert gpu._result(experiment, good, end)["result"] == {"a": 1}
    assert gpu._result(experiment, good, 0.0)["result"] == {"a": 1}
    assert gpu._result(experiment, broken, 0.0) == {"not_run": "the minutes were over"}


def test_the_report_judges_what_there_is():
    variants = {
        "fp32": {"seconds": [3.0, 3.0]},
        "autocast": {"seconds": [1.0, 1.0]},
        "bf16": {"seconds": [0.8, 0.8]},
    }
    found = {
        "tests test_cuda": {
            "result": {"passed": 3, "skipped": 0, "failed": {"a::b": "assert 1 == 2"}}, "seconds": 4.0,
        },
        "steps bert_base bf16": {"result": {"variants": variants}, "seconds": 5.0},
        "prediction bert_base": {
            "result": {"predicted_s": [2.0, 1.1], "measured": [{"ratio": 1.0}, {"ratio": 0.5}]},
            "seconds": 6.0,
        },
        "memory bert_base": {
            "result": {"fp32": {"peak_bytes": 100, "predicted_peak_bytes": 97}}, "seconds": 1.0,
        },
        "ranks one GPU": {
            "result": {"seconds": [0.2, 0.3, 0.4], "alone_s": [0.2], "predicted_s": 0.31}, "seconds": 2.0,
        },
        "demo gpt": {"cut": "cut after 240 s"},
    }  # fmt: skip
    bars = {bar["name"]: (bar["measured"], bar["holds"]) for bar in report.bars(found)}
    assert bars["tests that fail on the GPU"] == (1, False)
    assert bars["bert_base: bf16, x autocast"] == (1.25, True)
    assert bars["|predicted / measured - 1| of plans, worst"] == (pytest.approx(0.1), False)
    assert bars["|predicted / measured - 1| of peak memory, worst"] == (pytest.approx(0.03), True)
    cells = [str(cell) for table in report.tables(found) for column in table.columns for cell in column.cells]
    assert "1.50" in cells  # of two ranks, x the first alone
    assert "cut: cut after 240 s" in cells and "3 passed, 0 skipped, 1 failed, 4 s" in cells
    assert {bar["holds"] for bar in report.bars({})} == {None}


def test_make_gpu_runs_the_package_as_it_lies_here(tmp_path):
    """By a Python that has the packages, and no editable install of qsync.

    Python reads .pth files, which install finders, in its own site-packages only.
    """
    venv.create(tmp_path / "python", symlinks=True)
    own = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "python")})
    with_packages = [place for place in sys.path if place.endswith("-packages")]
    (Path(own) / "packages.pth").write_text("\n".join(with_packages))
    root = Path(__file__).parents[2]
    options = [f"PYTHON={tmp_path / 'python/bin/python'}", "GPU_ARGS=--device cpu --only nothing"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        ["make", "gpu", *options], cwd=root, env=clean, capture_output=True, text=True, check=False
    )
    assert "there is no group 'nothing'; choose from environment, tests" in done.stderr, done.stderr

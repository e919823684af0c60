"""The evidence about GPUs: a dry run of every piece on a CPU, deadlines, reasons, and cut runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import torch

from qsync.errors import QSyncError, UnsupportedError
from qsync.experiments.gpu import __main__ as gpu
from qsync.experiments.gpu import pieces as gpu_pieces
from qsync.experiments.gpu import report
from qsync.experiments.gpu.commands import run_within
from qsync.experiments.gpu.pieces import Piece, pieces
from qsync.experiments.harness import Experiment, one_gpu

DRY = ("--device", "cpu", "--tiny", "--minutes", "30")
GROUPS = list(dict.fromkeys(piece.group for piece in pieces(Path("out"), "cpu", True)))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qsync.experiments.gpu", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.deep
@pytest.mark.timeout(2400)  # up to eight processes in turn, beside other tests; kernels may be emulated
@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=[pytest.mark.dist] * (g in ("suite", "demo"))) for g in GROUPS]
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
    assert run(tmp_path, *DRY, "--only", group).returncode == 0  # from what is kept
    assert json.loads((tmp_path / "figures.json").read_text())["pieces"] == content["pieces"]


def test_whole_steps_come_first_and_tests_last():
    groups = ["environment", "suite", "demo", "kernels", "tests", "older architectures"]
    assert groups == GROUPS
    first, *_, last = pieces(Path("out"), "cuda", False)[1:]
    assert first.key == "suite speed bert_base" and last.key == "older architectures sm_89"
    assert "QSYNC_CUDA_ARCHITECTURE=89" in last.command and "-m" in last.command


MPS = """#!/bin/sh
echo "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> "$MPS_LOG"
[ "$1" = -d ] && exit $MPS_CODE
exit 0
"""


@pytest.mark.parametrize("code", [0, 1])
def test_one_gpu_is_divided_by_a_service_that_ends_with_the_ranks(code, tmp_path, monkeypatch):
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(MPS)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("MPS_LOG", str(log))
    monkeypatch.setenv("MPS_CODE", str(code))
    if code:
        with pytest.raises(UnsupportedError, match="did not start .*give each rank a GPU"):
            one_gpu.served("here").__enter__()
        return
    with one_gpu.served("here") as variables:
        assert variables["CUDA_MPS_PIPE_DIRECTORY"] == "here"
        assert log.read_text().split() == ["-d", "here"]
    assert log.read_text().split() == ["-d", "here", "quit", "here"]


def test_a_gpu_without_that_service_is_not_divided(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match="is not on the PATH; install it, or give each rank a GPU"):
        one_gpu.served("here").__enter__()


def test_the_parts_of_a_gpu_add_up_and_have_the_ratio_asked_for():
    assert one_gpu.percentages(0.5, 2, weak_rank=1) == [66.7, 33.3]
    assert one_gpu.percentages(1.0, 4, weak_rank=1) == [25.0] * 4


def test_the_tests_that_need_a_gpu_are_found():
    """By their mark, and by the fixture whose case it has."""
    assert {file.stem for file in gpu_pieces.tests()} == {
        "test_casts", "test_casts_gpu", "test_cuda", "test_cutlass", "test_epilogues", "test_kernel_timing",
        "test_norms", "test_parity", "test_profiler",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "only", "said"),
    [
        pytest.param("cuda", None, "cannot use a GPU .*--device cpu", marks=without_gpu),
        ("tpu", None, "cuda or cpu"),
        ("cpu", ["nothing"], "unknown group"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(device, only, said, tmp_path):
    with pytest.raises(QSyncError, match=said) as error:
        gpu.main(out=tmp_path, device=device, only=only, tiny=True)
    assert "\n" not in str(error.value)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    log = tmp_path / "log.txt"
    ended = run_within(["sh", "-c", "trap '' INT TERM; sleep 600 & echo $!; wait"], 2.0, log)
    assert ended.cut and "cut after 2 s" in (ended.why_not or "")
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_ends_its_piece(number, tmp_path):
    code = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from qsync.processes.exit_signals import exit_on_signals\n"
        "from qsync.experiments.gpu.commands import run_within\n"
        f"signal.signal({number}, signal.SIG_DFL)\n"  # the tests may run under nohup
        "exit_on_signals()\n"
        "piece = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "run_within([sys.executable, '-c', piece], 600.0, Path(sys.argv[1]))\n"
    )
    log = tmp_path / "log.txt"
    process = subprocess.Popen([sys.executable, "-c", code, str(log)])
    end = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == 128 + number and gone(int(log.read_text().split()[0]))


def test_failing_tests_are_a_result_and_what_was_cut_comes_last_next_time(tmp_path, monkeypatch):
    (tmp_path / "test_made.py").write_text("def test_one(): pass\ndef test_two(): assert 1 == 2\n")
    result = tmp_path / "made.xml"
    command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={result}", str(tmp_path / "test_made.py"))
    experiment = Experiment("gpu", tmp_path, settings={"device": "cpu", "tiny": True})
    made = gpu._result(experiment, Piece("tests", "made", command, 60.0, result), time.monotonic() + 600)
    assert (made["result"]["passed"], len(made["result"]["failed"])) == (1, 1)
    bars = report.bars({"tests made": made})
    assert bars[0]["measured"] == 1 and not bars[0]["holds"]
    passed = {"result": {"passed": 2, "skipped": 0, "failed": {}}, "seconds": 1.0}
    assert report.bars({"tests made": passed, "tests other": {"cut": "why"}})[0]["holds"] is None
    hangs = Piece("memory", "hangs", (sys.executable, "-c", "input()"), 60.0, tmp_path / "no.json")
    experiment.keep(hangs.key, {"cut": "cut after 1 s"})
    new = Piece("memory", "new", hangs.command, 60.0, tmp_path / "new.json")
    ran = []
    monkeypatch.setattr(gpu, "pieces", lambda *_: [hangs, new])
    monkeypatch.setattr(gpu, "_measured", lambda _, piece, most_s: ran.append(piece) or {"failed": "why"})
    gpu.main(out=tmp_path, device="cpu", tiny=True, only=None)
    assert ran == [new, hangs]
    assert list(json.loads((tmp_path / "figures.json").read_text())["pieces"]) == [hangs.key, new.key]


def test_pieces_without_a_result_are_tried_again_and_leave_the_rest(tmp_path):
    experiment, made = Experiment("gpu", tmp_path, settings={}), tmp_path / "made.json"
    end = time.monotonic() + 600

    def piece(name: str, code: str) -> Piece:
        return Piece("memory", name, (sys.executable, "-c", code), 60.0, made)

    def writing(content: str) -> Piece:
        return piece("made", f"import pathlib; pathlib.Path({str(made)!r}).write_text({content!r})")

    why, broken = {"failed": "OutOfMemoryError: CUDA"}, piece("broken", "exit(1)")
    failing = writing(json.dumps({"families": {"bert_base": {"memory": why}}}))
    assert gpu._result(experiment, failing, end) == why
    silent = gpu._result(experiment, piece("made", ""), end)
    assert silent == {"failed": "it wrote no result"}  # not the file of before
    assert gpu._result(experiment, writing('{"a": 1}'), end)["result"] == {"a": 1}
    assert "failed" in gpu._result(experiment, broken, end)
    assert gpu._result(experiment, piece("made", "exit(1)"), 0.0)["result"] == {"a": 1}  # is kept
    assert "failed" in gpu._result(experiment, broken, 0.0)
    assert gpu._result(experiment, piece("untried", ""), 0.0) == {"not_run": "the minutes were over"}


def test_the_report_judges_what_there_is():

    def suite(name: str, **parts: dict) -> dict:
        return {"result": {"families": {name: parts}}, "seconds": 5.0}

    variants = {
        "eager": {"seconds": [3.0, 3.0]},
        "fp32": {"seconds": [3.0, 3.0]},
        "autocast": {"seconds": [1.0, 1.0]},
        "bf16": {"seconds": [0.8, 0.8]},
    }
    found = {
        "tests test_cuda": {
            "result": {"passed": 3, "skipped": 0, "failed": {"a::b": "assert 1 == 2"}}, "seconds": 4.0,
        },
        "suite speed bert_base": suite("bert_base", speed={"variants": variants, "unavailable": {}}),
        "suite speed gpt2_small": suite("gpt2_small", speed={
            "variants": {of: variants[of] for of in ("eager", "fp32", "autocast")},
            "unavailable": {"bf16": "OutOfMemoryError: 2"},
        }),
        "suite prediction bert_base": suite("bert_base", prediction={"errors": [-0.1, 0.05], "inside": []}),
        "suite memory bert_base": suite(
            "bert_base", memory={"fp32": {"peak_bytes": 100, "predicted_peak_bytes": 97}}
        ),
        "demo gpt": {"cut": "cut after 240 s"},
    }  # fmt: skip
    bars = {bar["name"]: (bar["measured"], bar["holds"]) for bar in report.bars(found)}
    assert bars["tests that fail on the GPU"] == (1, False)
    assert bars["bert_base: bf16, x autocast"] == (1.25, True)
    assert bars["gpt2_small: bf16, x autocast"] == (0.0, False)
    assert bars["|predicted / measured - 1| of plans, worst"] == (pytest.approx(0.1), False)
    assert bars["|predicted / measured - 1| of memory peaks, worst"] == (pytest.approx(0.03), True)
    steps, states = report.tables(found)
    assert list(steps.columns[0].cells) == ["bert_base", "gpt2_small"]
    assert "1.25 (1.25-1.25)" in list(steps.columns[-1].cells)
    assert next(iter(states.columns[1].cells)) == "3 passed, 0 skipped, 1 failed, 4 s"
    assert list(states.columns[0].cells)[1:] == [
        "suite speed bert_base, suite speed gpt2_small, suite prediction bert_base, suite memory bert_base",
        "demo gpt",
    ]
    assert list(states.columns[1].cells)[1:] == ["5 s", "cut: cut after 240 s"]
    assert report.failures(found) == [
        "Failed: a::b: assert 1 == 2",
        "Failed: gpt2_small bf16: OutOfMemoryError: 2",
    ]
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
    assert "unknown group 'nothing'; choose from environment, suite" in done.stderr, done.stderr
    assert "error 2" in done.stderr.lower() and "Traceback" not in done.stderr

"""List the pieces of evidence by value: commands with their time limits."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qsync.experiments.kernels.compare_kernels import SECTIONS
from qsync.experiments.workloads.families import LARGE

_TESTS = Path(__file__).resolve().parents[2] / "tests"
# `both` (tests/support/compiled_and_plain.py) is a fixture with a GPU case.
_CUDA_CASES = re.compile(r"mark\.cuda|def test_\w+\([^)]*\bboth\b")
_PLUGINS_OFF = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # cacheprovider warns in parallel runs
_MOST_WORKERS = 8
# Tests of the kernels that are compiled for an architecture.
_OF_COMPILED = ("test_casts_gpu", "test_cutlass", "test_epilogues", "test_parity")
# The sections of compare_kernels about layers, in this order; whole steps are separate pieces.
_LAYERS = ("linear training", "conv training", "attention training", "quantize", "host")
assert set(_LAYERS) <= set(SECTIONS)
# What users train first: models whose steps are timed, and those whose plans are predicted. Seconds at most.
_STEPS = ("bert_base", "gpt2_medium", "resnet50_224", "llama_1b", "bert_base_8", "gpt2_small")
_PREDICTED = ("bert_base", "gpt2_medium", "resnet50_224")
assert set(_STEPS) == set(LARGE)
_SUITE = {"speed": 170, "compiled": 170, "prediction": 170, "memory": 60}
_QUICK_DEMO = ("--workload", "resnet-small", "--steps", "2")
_CONFIG = Path(__file__).with_name("gpt2_small.json")
# Cards whose kernels this GPU runs from their PTX: V100, T4, A100, L4.
OLDER = ("70", "75", "80", "89")


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece: its group, name, command, time limit and result file."""

    group: str
    name: str
    command: tuple[str, ...]
    most_s: float
    result: Path

    @property
    def key(self) -> str:
        """Return the piece's name within the experiment."""
        return f"{self.group} {self.name}"


def pieces(out: Path, device: str, tiny: bool) -> list[Piece]:
    """List the pieces, whose results go to `out`: whole steps first, tests last."""
    return list(_pieces(out, device, tiny))


def _pieces(out: Path, device: str, tiny: bool) -> Iterator[Piece]:
    # It compiles the kernels that later pieces run; its output is its result.
    doctor = _module("qsync.commands.main", "doctor")
    yield Piece("environment", "doctor", doctor, 170, out / "logs" / "environment-doctor.txt")
    steps = itertools.product(_STEPS, ("speed", "compiled"))
    predictions = itertools.product(_PREDICTED, ("prediction", "memory"))
    for name, part in (*steps, *predictions):
        folder = out / "suite" / f"{part}-{name}"
        of_suite = ("--only", name, "--part", part, "--device", device, "--out", str(folder))
        measured = _module("qsync.experiments.unseen", *of_suite, *(("--tiny",) if tiny else ()))
        yield Piece("suite", f"{part} {name}", measured, _SUITE[part], folder / "figures.json")
    folder = out / "demo"
    options = _QUICK_DEMO if tiny else ("--model", f"hf:{_CONFIG}", "--steps", "24")
    demo = _module("qsync.commands.main", "demo", "--out", str(folder), *options)
    yield Piece("demo", "two ranks", demo, 240, folder / "figures.json")
    for section in _LAYERS:
        folder = out / "kernels" / section.replace(" ", "-")
        chosen = ("--only", section, "--device", device, "--out", str(folder))
        quick = ("--quick",) if tiny else ()
        command = _module("qsync.experiments.kernels.compare_kernels", *chosen, *quick)
        yield Piece("kernels", section, command, 120, folder / "figures.json")
    for file in tests():
        yield _tested("tests", file.stem, (file,), out)
    for older in OLDER:
        compiled = [file for file in tests() if file.stem in _OF_COMPILED]
        yield _tested("older architectures", f"sm_{older}", compiled, out, QSYNC_CUDA_ARCHITECTURE=older)


def _tested(group: str, name: str, files: Sequence[Path], out: Path, **environment: str) -> Piece:
    """Return a piece of test files that need a GPU."""
    result = out / "tests" / f"{name}.xml"
    options = ("-m", "cuda", "-q", "-n", str(_workers()), *_PLUGINS_OFF, f"--junitxml={result}")
    command = _module("pytest", *options, *map(str, files))
    variables = ("env", *(f"{key}={value}" for key, value in environment.items())) if environment else ()
    return Piece(group, name, (*variables, *command), 170, result)


def tests() -> Sequence[Path]:
    """Return the test files that need a GPU; none for a package without tests."""
    files = sorted(_TESTS.rglob("test_*.py"))
    return [file for file in files if _CUDA_CASES.search(file.read_text(encoding="utf-8"))]


def _workers() -> int:
    """Return the number of parallel test processes: they share a GPU, and each needs a core."""
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)

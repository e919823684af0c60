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
# The sections of compare_kernels about layers, in this order; whole steps are separate pieces.
_LAYERS = ("linear training", "conv training", "attention training", "quantize", "host")
assert set(_LAYERS) <= set(SECTIONS)
_SUITE = {"speed": 240, "prediction": 240, "memory": 60}  # parts, with their time limits in seconds
_QUICK_DEMO = ("--workload", "resnet-small", "--steps", "2")


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
    """List the pieces, whose results go to `out`."""
    return list(_pieces(out, device, tiny))


def _pieces(out: Path, device: str, tiny: bool) -> Iterator[Piece]:
    # It compiles the kernels that later pieces run; its output is its result.
    doctor = _module("qsync.commands.main", "doctor")
    yield Piece("environment", "doctor", doctor, 240, out / "logs" / "environment-doctor.txt")
    for file in tests():
        result = out / "tests" / f"{file.stem}.xml"
        workers = ("-n", str(_workers()), *_PLUGINS_OFF)
        options = ("-m", "cuda", "-q", *workers, f"--junitxml={result}", str(file))
        yield Piece("tests", file.stem, _module("pytest", *options), 150, result)
    for section in _LAYERS:
        folder = out / "kernels" / section.replace(" ", "-")
        chosen = ("--only", section, "--device", device, "--out", str(folder))
        quick = ("--quick",) if tiny else ()
        command = _module("qsync.experiments.kernels.compare_kernels", *chosen, *quick)
        yield Piece("kernels", section, command, 120, folder / "figures.json")
    for part, name in itertools.product(_SUITE, LARGE):
        folder = out / "suite" / f"{part}-{name}"
        of_suite = ("--only", name, "--part", part, "--device", device, "--out", str(folder))
        measured = _module("qsync.experiments.unseen", *of_suite, *(("--tiny",) if tiny else ()))
        yield Piece("suite", f"{part} {name}", measured, _SUITE[part], folder / "figures.json")
    folder = out / "demo"
    demo = _module("qsync.commands.main", "demo", "--out", str(folder), *(_QUICK_DEMO if tiny else ()))
    yield Piece("demo", "two ranks", demo, 240, folder / "figures.json")


def tests() -> Sequence[Path]:
    """Return the test files that need a GPU; none for a package without tests."""
    files = sorted(_TESTS.rglob("test_*.py"))
    return [file for file in files if _CUDA_CASES.search(file.read_text(encoding="utf-8"))]


def _workers() -> int:
    """Return the number of parallel test processes: they share a GPU, and each needs a core."""
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)

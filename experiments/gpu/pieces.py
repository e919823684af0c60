"""The pieces of evidence, most valuable first: each is a command of its own, with the seconds it may take."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from qsync.experiments.gpu.measured import GPU_AND_CPU, ONE_GPU
from qsync.experiments.kernels.compare_kernels import SECTIONS
from qsync.experiments.workloads.families import LARGE

_TESTS = Path(__file__).resolve().parents[2] / "tests"
# `both` (tests/support/compiled_and_plain.py) is a fixture with a case on a GPU.
_CUDA_CASES = re.compile(r"mark\.cuda|def test_\w+\([^)]*\bboth\b")
_TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist")  # pyproject.toml has options and markers of theirs
_PLUGINS_OFF = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the latter warns of workers
_MOST_WORKERS = 8
# Of the sections of compare_kernels those of layers, in this order; whole steps are pieces of their own.
_LAYERS = (
    "linear training", "conv training", "attention training", "linear forward", "conv forward",
    "attention forward", "quantize", "host",
)  # fmt: skip
assert set(_LAYERS) <= set(SECTIONS)
# The modes that are timed beside FP32 and torch.autocast, a piece each; those also timed compiled, beside
# other peers.
_MODES = (("bf16",), ("int8", "fp8", "int8_all", "tf32"))
_COMPILED_MODES = ("bf16", "int8", "fp8")
# A trained copy of the largest takes 16 bytes a parameter, 18 GB: FP32, autocast and one mode fit a card of
# 80 GB, and nothing else: no compiled form, no other peer.
_LARGEST, _LARGEST_MODES = "llama_1b", (("bf16",), ("int8",), ("fp8",))
_QUICK_DEMO = ("--workload", "resnet-small", "--steps", "2")
_ON_CPU = {"fp8": "fp32", "tf32": "fp32"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece: its group and name, its command, the seconds it may take, and the file that it writes.

    `needs` are packages to install beside those of qsync.
    """

    group: str
    name: str
    command: tuple[str, ...]
    most_s: float
    result: Path
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of the piece within the experiment."""
        return f"{self.group} {self.name}"


def pieces(out: Path, device: str, tiny: bool) -> list[Piece]:
    """List the pieces, whose results go to `out`."""
    return list(_pieces(out, device, tiny))


def _pieces(out: Path, device: str, tiny: bool) -> Iterator[Piece]:
    def measured(group: str, name: str, most_s: float, function: str, *arguments: Any) -> Piece:
        result = out / "measured" / f"{group}-{name}.json".replace(" ", "-")
        given = json.dumps([function, list(arguments), str(result)])
        return Piece(group, name, _module("qsync.experiments.gpu.measured", given), most_s, result)

    yield measured("environment", "machine", 120, "environment", device)
    yield measured("environment", "doctor", 240, "doctor")  # compiles what the kernels and steps below run
    for file in tests():
        result = out / "tests" / f"{file.stem}.xml"
        workers = ("-n", str(_workers()), *_PLUGINS_OFF)
        options = ("-m", "cuda", "-q", *workers, f"--junitxml={result}", str(file))
        imports_tvm = "qsync.backend.casts.tvm import" in file.read_text(encoding="utf-8")
        needs = (*_TEST_TOOLS, *(("apache-tvm",) if imports_tvm else ()))  # others run what is compiled
        yield Piece("tests", file.stem, _module("pytest", *options), 150, result, needs)
    for section in _LAYERS:
        folder = out / "kernels" / section.replace(" ", "-")
        chosen = ("--only", section, "--device", device, "--out", str(folder))
        quick = ("--quick",) if tiny else ()
        command = _module("qsync.experiments.kernels.compare_kernels", *chosen, *quick)
        yield Piece("kernels", section, command, 120, folder / "figures.json")
    parts = {name: _LARGEST_MODES if name == _LARGEST else _MODES for name in LARGE}
    timed = [(name, modes) for name in LARGE for modes in ([sum(parts[name], ())] if tiny else parts[name])]
    for name, modes in sorted(timed, key=lambda each: each[1] != _MODES[0]):  # every promise first
        arguments = (name, _able(modes, device), False, tiny, device)
        yield measured("steps", f"{name} {modes[0]}", 120, "steps", *arguments)
    for name in ("bert_base", "resnet50_224", "gpt2_small"):
        yield measured("prediction", name, 240, "prediction", name, tiny, device)
        yield measured("memory", name, 60, "memory", name, _able(_COMPILED_MODES, device), tiny, device)
    for where in (ONE_GPU, GPU_AND_CPU):
        yield measured("ranks", where, 240, "ranks", where, tiny, device)  # a profile on each
    for backend in ("nccl", "gloo"):
        yield measured("collectives", backend, 60, "collectives", backend, device)
    for name in list(LARGE)[: 1 if tiny else None]:  # of no size nothing is compiled
        if name != _LARGEST:
            arguments = (name, _able(_COMPILED_MODES, device), True, tiny, device)
            yield measured("compiled", name, 240, "steps", *arguments)
    folder = out / "demo"
    demo = _module("qsync.commands.main", "demo", "--out", str(folder), *(_QUICK_DEMO if tiny else ()))
    yield Piece("demo", "two ranks", demo, 240, folder / "report.json")


def tests() -> Sequence[Path]:
    """Return the files of tests that need a GPU; none where the package has no tests beside it."""
    files = sorted(_TESTS.rglob("test_*.py"))
    return [file for file in files if _CUDA_CASES.search(file.read_text(encoding="utf-8"))]


def lacking(piece: Piece) -> list[str]:
    """Return the packages that a piece needs and this Python lacks."""
    return [name for name in piece.needs if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _workers() -> int:
    """Return how many processes test at once: a GPU serves several, and each needs a core."""
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))


def _able(modes: Sequence[str], device: str) -> list[str]:
    """Return the modes that a kind of device has; on a CPU others stand for those that it lacks."""
    return list(dict.fromkeys(mode if device == "cuda" else _ON_CPU.get(mode, mode) for mode in modes))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)

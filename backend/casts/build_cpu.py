"""Compile the fused casts for this machine's processor, by TVM through LLVM."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import torch

from qsync.backend.casts.build_process import first_line, run_apart
from qsync.backend.devices.amx import has_amx
from qsync.errors import BuildError


def processor() -> str:
    """Describe the processor: architecture, model, instruction sets (as Linux lists them) and `features`."""
    facts = [platform.machine(), platform.system()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    for wanted in ("model name", "flags", "Features"):
        facts += [line.partition(":")[2].strip() for line in lines if line.startswith(wanted)][:1]
    return "; ".join([*facts, *features()])


def features() -> list[str]:
    """Return what LLVM is to use beside what it knows of the processor by its name."""
    # LLVM takes half of a vector on these processors unless told: 2.1 ms, and 1.0 to round 1024x2048.
    return ["+amx-tile", "+amx-int8", "-prefer-256-bit"] if _has_amx() else []


def _has_amx() -> bool:
    return has_amx(torch.device("cpu"))


def executable() -> Any:
    """Compile the programs in memory; a second or two with TVM's import. Raises BuildError."""
    try:
        import tvm
        from tvm.target import codegen

        from qsync.backend.casts.tvm import rows

        options = {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "mattr": features(), "opt-level": 3}
        return tvm.compile(rows.module(has_amx=_has_amx()), target=tvm.target.Target(options))
    except Exception as error:
        raise BuildError(f"TVM cannot compile the casts ({first_line(error)})") from error


def export_once(path: Path) -> None:
    """Compile the programs into a library at `path`, in a process of its own, and announce it."""
    print(f"qsync: compiling casts for this processor, once, into {path.parent}", file=sys.stderr)
    run_apart("from qsync.backend.casts.build_cpu import export; export(path)", path)


def export(path: str) -> None:
    """Compile the programs into a library at `path`; TVM links it with a C++ compiler."""
    executable().export_library(path)

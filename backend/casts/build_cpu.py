"""Compile the fused casts for this machine's processor, by TVM through LLVM."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import torch

from qsync.backend.amx import has_amx
from qsync.backend.casts.build_process import first_line, run_apart
from qsync.errors import BuildError


def processor() -> str:
    """Describe the processor: architecture, model and instruction sets, if Linux lists them."""
    facts = [platform.machine(), platform.system()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    for wanted in ("model name", "flags", "Features"):
        facts += [line.partition(":")[2].strip() for line in lines if line.startswith(wanted)][:1]
    return "; ".join(facts)


def executable() -> Any:
    """Compile the programs in memory; a second or two with TVM's import. Raises BuildError."""
    try:
        import tvm
        from tvm.target import codegen

        from qsync.backend.casts.tvm import rows

        tiles = has_amx(torch.device("cpu"))
        features = ["+amx-tile", "+amx-int8"] if tiles else []
        target = {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "mattr": features, "opt-level": 3}
        return tvm.compile(rows.module(has_amx=tiles), target=tvm.target.Target(target))
    except Exception as error:
        raise BuildError(f"TVM cannot compile the casts ({first_line(error)})") from error


def export_once(path: Path) -> None:
    """Compile the programs into a library at `path`, in a process of its own, and announce it."""
    print(f"qsync: compiling casts for this processor, once, into {path.parent}", file=sys.stderr)
    run_apart("from qsync.backend.casts.build_cpu import export; export(path)", path)


def export(path: str) -> None:
    """Compile the programs into a library at `path`; TVM links it with a C++ compiler."""
    executable().export_library(path)

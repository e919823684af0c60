"""Compile the fused casts for this machine's processor, by TVM through LLVM."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch

from qsync.backend.casts.build_process import first_line, run_apart
from qsync.backend.devices.amx import has_amx
from qsync.backend.devices.processor import granted_flags, processor
from qsync.errors import BuildError

# Instruction sets with the same names in LLVM and Linux, but for underscores and hyphens. LLVM derives them
# from the processor's name. A hypervisor may withhold them, and their instructions then end the process.
_WITHHELD = ("amx", "avx", "bmi2", "f16c", "fma", "gfni", "movbe", "popcnt", "vaes", "vpclmulqdq")


def determined_by() -> dict[str, str]:
    """Return the facts about this processor and this file that determine the compiled code."""
    return {
        "processor": f"{platform.system()} {processor()}",
        "flags": " ".join(sorted(granted_flags())),
        "features": " ".join(_preferred()),
        "build": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def withheld(known: Iterable[str], granted: Set[str]) -> list[str]:
    """Return the processor features assumed by LLVM that the system does not grant.

    >>> withheld(["avx2", "avx512vnni", "fast-lzcnt"], {"avx2", "fma"})
    ['avx512vnni']
    """
    plain = {flag.replace("_", "") for flag in granted}
    return [name for name in known if name.startswith(_WITHHELD) and re.sub(r"\W", "", name) not in plain]


def _preferred() -> list[str]:
    """Return further LLVM features to use on this processor."""
    # By default LLVM uses half of a vector register here: 2.1 ms, and 1.0 with this, to round 1024x2048.
    return ["+amx-tile", "+amx-int8", "-prefer-256-bit"] if _has_amx() else []


def _has_amx() -> bool:
    return has_amx(torch.device("cpu"))


def executable() -> Any:
    """Compile the programs in memory, in a second or two. Raises BuildError."""
    try:
        from tvm.target import codegen

        return compiled_for(codegen.llvm_get_system_cpu(), granted_flags())
    except Exception as error:
        raise BuildError(
            f"TVM cannot compile the casts ({first_line(error)}); reinstall apache-tvm"
        ) from error


def compiled_for(model: str, granted: Set[str]) -> Any:
    """Compile the programs for a processor of LLVM's name with the granted instruction sets."""
    import tvm
    from tvm.target import codegen

    from qsync.backend.casts.tvm import rows

    options = {"kind": "llvm", "mcpu": model, "opt-level": 3}
    known = codegen.llvm_get_cpu_features(tvm.target.Target(options)) if granted else ()
    masked = [f"-{name}" for name in withheld(known, granted)]
    target = tvm.target.Target(options | {"mattr": [*_preferred(), *masked]})
    return tvm.compile(rows.module(has_amx=_has_amx()), target=target)


def export_once(path: Path) -> None:
    """Compile the programs into a library at `path`, in a separate process, and print a line."""
    print(f"qsync: compiling casts for this processor (once per machine) into {path.parent}", file=sys.stderr)
    run_apart("from qsync.backend.casts.build_cpu import export; export(path)", path)


def export(path: str) -> None:
    """Compile the programs into a library at `path`; TVM links it with a C++ compiler."""
    executable().export_library(path)

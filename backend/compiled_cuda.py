"""The fused casts for NVIDIA GPUs: CUDA C of TVM's, compiled by nvcc for one architecture, loaded by tvm_ffi.

Two libraries make one module: TVM's host code, which checks the tensors, and the kernels with what launches
them (launching.h). The kernels are written for compute capability 7.0, so that one source serves every GPU.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qsync.backend import kernel_cache
from qsync.backend.cutlass import build
from qsync.errors import BuildError

OLDEST = "70"  # the compute capability that the CUDA C is written for


def load(architecture: str, facts: Mapping[str, str]) -> Any:
    """The module of one architecture ("75", "90"), compiled if need be. Raises BuildError.

    `facts` is what decides what TVM generates: see `qsync.backend.compiled`.
    """
    import tvm_ffi

    tools = build.toolchain(architecture, with_headers=False)
    compiler = {
        "architecture": architecture,
        "compiler": tools.version,
        "assembler": "" if tools.assembler is None else build._version(tools.assembler),
        "launching": _launching().read_text(),
    }
    host = kernel_cache.built("casts-cuda", facts, export_host)
    kernels = kernel_cache.built(
        f"casts-sm{architecture}", {**facts, **compiler}, lambda path: compile_kernels(path, architecture)
    )
    module = tvm_ffi.load_module(str(host))
    module.import_module(tvm_ffi.load_module(str(kernels)))
    return module


@cache
def generated(architecture: str = OLDEST) -> tuple[Any, str]:
    """TVM's host module, without the kernels, and the kernels in CUDA C. Raises BuildError."""
    try:
        import tvm

        from qsync.backend import fused

        target = tvm.target.Target({"kind": "cuda", "arch": f"sm_{architecture}"}, host={"kind": "llvm"})
        executable = tvm.compile(fused.module("cuda"), target=target)
        source = executable.mod.imports[0].inspect_source()
        executable.mod.clear_imports()
        return executable, source
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise BuildError(f"TVM cannot compile the casts for GPUs ({reason})") from error


def export_host(path: Path) -> None:
    """Write TVM's host code as a library. Raises BuildError."""
    executable, _ = generated()
    try:
        executable.export_library(str(path))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise BuildError(
            f"TVM cannot link the casts ({reason}); install a C++ compiler (g++ or clang++)"
        ) from error


def compile_kernels(path: Path, architecture: str) -> None:
    """Compile the kernels, with what launches them, into a library. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="qsync-casts-") as folder:
        source = Path(folder) / "casts.cu"
        source.write_text(complete(generated()[1]))
        build.compile_file(path, source, architecture, [f"-I{place}" for place in include_folders()])


def complete(source: str) -> str:
    """TVM's CUDA C with a function that launches each of its kernels."""
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\([^;]*?\) \{", source)
    # First: TVM defines the word `uint`, which system headers declare.
    lines = ['#include "launching.h"', source, *(f"EXPORT({kernel})" for kernel in kernels)]
    return "\n".join(lines) + "\n"


def include_folders() -> list[Path]:
    """Where launching.h is, and the headers of tvm_ffi that it needs."""
    import tvm_ffi.libinfo

    return [_launching().parent, *(Path(place) for place in tvm_ffi.libinfo.include_paths())]


def _launching() -> Path:
    return Path(__file__).with_name("launching.h")

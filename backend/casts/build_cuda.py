"""Compile the fused casts for NVIDIA GPUs: TVM writes CUDA C, and nvcc compiles it.

Two libraries make one module, which tvm_ffi loads: TVM's host code, which checks the tensors, and the kernels
with their launcher (launching.h). The kernels are written for compute capability 7.0, so that one source
serves every GPU.
"""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qsync.backend import cuda_build, kernel_cache
from qsync.backend.casts.build_process import run_apart
from qsync.errors import BuildError

_OLDEST = "70"  # the compute capability that the CUDA C is written for
# Functions that TVM's host code calls through pointers; the library's loader must fill them.
_CALLED = (
    "TVMFFIFunctionCall", "TVMFFIHandleInitOnce", "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIEnvModLookupFromImports",
)  # fmt: skip


def load(architecture: str, facts: Mapping[str, str]) -> Any:
    """Load the module of one architecture ("75"), compiled if necessary. Raises BuildError.

    `facts` determine what TVM generates: see `qsync.backend.casts.compiled_casts`.
    """
    import tvm_ffi

    tools = cuda_build.toolchain(architecture, with_headers=False)
    compiler = {"compiler": tools.version, "assembler": tools.assembler or ""}
    compiler["environment"] = cuda_build.environment_flags()
    compiler |= {"architecture": architecture, "launching": _launching().read_text()}
    compiler["flags"] = Path(__file__).read_text() + Path(cuda_build.__file__).read_text()

    def kernels_to(path: Path) -> None:
        where = f"sm_{architecture} (once per machine) into {path.parent}"
        print(f"qsync: compiling casts for {where}", file=sys.stderr)
        run_apart(
            f"from qsync.backend.casts import build_cuda; build_cuda.export_kernels(path, {architecture!r})",
            path,
        )

    def host_to(path: Path) -> None:
        run_apart("from qsync.backend.casts import build_cuda; build_cuda.export_host(path)", path)

    kernels = kernel_cache.built(f"casts-sm{architecture}", {**facts, **compiler}, kernels_to)
    host = kernel_cache.built("casts-host", facts, host_to)
    _register_called()
    module = tvm_ffi.load_module(str(host))
    module.import_module(tvm_ffi.load_module(str(kernels)))
    return module


@cache
def _register_called() -> None:
    """Register with tvm_ffi the functions that host code calls, as TVM's runtime does on loading.

    Otherwise the pointers stay null, and the first launch crashes the process.
    """
    import tvm_ffi.libinfo

    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    for name in _CALLED:
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        if library.TVMFFIEnvModRegisterContextSymbol(f"__{name}".encode(), address):
            raise BuildError(
                f"tvm_ffi {tvm_ffi.__version__} does not accept the function {name}: install "
                "another release of apache-tvm-ffi"
            )


@cache
def generated() -> tuple[Any, str]:
    """Return TVM's host code, without the kernels, and the kernels in CUDA C for every architecture."""
    import tvm

    from qsync.backend.casts.tvm import rows

    target = tvm.target.Target({"kind": "cuda", "arch": f"sm_{_OLDEST}"}, host={"kind": "llvm"})
    executable = tvm.compile(rows.module("cuda"), target=target)
    source = executable.mod.imports[0].inspect_source()
    executable.mod.clear_imports()
    return executable, source


def export_host(path: str) -> None:
    """Write TVM's host code as a library."""
    generated()[0].export_library(path)


def export_kernels(path: str, architecture: str) -> None:
    """Compile the kernels and their launcher into a library. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="qsync-casts-") as folder:
        source = Path(folder) / "casts.cu"
        source.write_text(complete(generated()[1]))
        flags = [f"-I{place}" for place in include_folders()]
        cuda_build.compile_file(Path(path), source, architecture, flags)


def complete(source: str) -> str:
    """Return TVM's CUDA C with a function that launches each of its kernels."""
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\([^;]*?\) \{", source)
    # First: TVM defines the word `uint`, which system headers declare.
    lines = ['#include "launching.h"', source, *(f"EXPORT({kernel})" for kernel in kernels)]
    return "\n".join(lines) + "\n"


def include_folders() -> list[Path]:
    """Return the folders of launching.h and of the headers of tvm_ffi that it needs."""
    import tvm_ffi.libinfo

    return [_launching().parent, *(Path(place) for place in tvm_ffi.libinfo.include_paths())]


def _launching() -> Path:
    return Path(__file__).with_name("launching.h")

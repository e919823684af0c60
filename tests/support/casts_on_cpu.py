"""The fused casts of GPUs, executed on a CPU: the CUDA C that TVM generates, compiled by g++.

All but the launch itself is what runs on a GPU: TVM's host code, launching.h and the kernels. Where CUDA
would launch, tests/cuda_on_cpu runs the blocks and their threads in turn.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
import tvm_ffi

from qsync.backend.casts import build_cuda
from qsync.backend.casts import compiled_casts as compiled
from qsync.backend.casts.tvm.constants import ROWS_PER_PART

_CUDA = 2  # kDLCUDA
_DEVICE_OF_A_TENSOR = 24 + 8  # an object's header, then the address of the data


class OnCpu(compiled.Library):
    """Takes tensors of the CPU for those of a GPU."""

    def __missing__(self, name):
        function = self._module[name]
        self[name] = lambda *arguments: function(*map(_as_if_on_a_gpu, arguments))
        return self[name]


@cache
def shared() -> OnCpu:
    """The casts of GPUs, compiled once for all tests of a process."""
    with tempfile.TemporaryDirectory(prefix="qsync-casts-") as folder:  # what is loaded needs no file
        return library(Path(folder))


def library(folder: Path, source: str | None = None) -> OnCpu:
    """The casts of GPUs, compiled into the folder; from another source if one is given."""
    host, kernels, code = folder / "host.so", folder / "kernels.so", folder / "casts.cpp"
    build_cuda.export_host(str(host))
    text = build_cuda.complete(source or build_cuda.generated()[1])
    code.write_text(text.replace("__shared__ alignas(64)", "__shared__"))  # g++ wants them the other way
    headers = [Path(__file__).parent / "cuda_on_cpu", *build_cuda.include_folders()]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]
    command += [*(f"-I{header}" for header in headers), str(code), "-o", str(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:2000]
    module = tvm_ffi.load_module(str(host))
    module.import_module(tvm_ffi.load_module(str(kernels)))
    return OnCpu(module, ROWS_PER_PART)


def _as_if_on_a_gpu(argument):
    if not isinstance(argument, torch.Tensor):
        return argument
    tensor = tvm_ffi.from_dlpack(argument.detach())
    ctypes.c_int32.from_address(tensor.__chandle__() + _DEVICE_OF_A_TENSOR).value = _CUDA
    return tensor

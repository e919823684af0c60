"""The fused casts as programs for GPUs: what is generated, what compiles, and what the emulation would find.

That they compute what the plain casts do is in test_backend_casts.py, on a CPU thread by thread and, where
there is one, on a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import casts_on_cpu
import pytest
import torch

from qsync.backend import cuda_build
from qsync.backend.casts import autotune, build_cuda, cast_ops, epilogues
from qsync.backend.casts import compiled_casts as compiled
from qsync.backend.casts.tvm import activations, attention, columns, dropout, expressions
from qsync.backend.casts.tvm import rows as fused
from qsync.backend.casts.tvm.constants import SMALLEST_AMAX
from qsync.errors import BuildError

pytestmark = pytest.mark.xdist_group("casts")  # one process compiles the programs of GPUs for all of them

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to execute the programs with")


# GPUs have faster ones, and their generator counts.
FOR_CPUS = {
    "to_bf16",
    "depthwise_weight_gradient",
    "gelu_tanh_bfloat16",
    *attention.programs(),
    *dropout.programs(),
}


@cache
def names_on_gpus() -> set[str]:
    return {name.name_hint for name in fused.module("cuda").functions}


def test_every_program_has_kernels():
    names = names_on_gpus()
    for_cpus = {name.name_hint for name in fused.module("cpu").functions}
    assert names == for_cpus - FOR_CPUS
    source = build_cuda.generated()[1]
    for name in names:
        assert f"{name}_kernel(" in source


def test_the_parts_of_a_column_are_those_that_the_programs_reduce():
    assert compiled.ROWS_PER_PART == activations.ROWS_PER_PART == columns.ROWS_PER_PART


def test_a_row_of_zeros_has_the_same_magnitude_compiled_and_plain():
    assert torch.tensor(SMALLEST_AMAX).view(torch.int32) == expressions.SMALLEST_AMAX_BITS == 0x0554AD2E


def test_the_source_uses_nothing_newer_than_volta():
    """No BF16 types or instructions (8.0), no asynchronous copies (8.0), no clusters (9.0), no assembly."""
    source = build_cuda.generated()[1]
    kernels = source[source.index("__global__") :]
    for newer in ("nv_bfloat16", "asm", "cp.async", "cluster", "__reduce_", "mma", "tcgen"):
        assert newer not in kernels
    called = set(re.findall(r"\b([A-Za-z_]\w*)\(", kernels)) - {"if", "for", "__launch_bounds__", "alignas"}
    assert {name for name in called if not name.endswith(("_kernel", "_kernel_1", "_kernel_2"))} <= {
        "__syncthreads",
        "floorf",
        "fmaf",
        "max",
        "min",
        "nearbyintf",
    }


@pytest.mark.parametrize(
    "architecture",
    ["75", *(pytest.param(name, marks=pytest.mark.deep) for name in ("70", "80", "89", "90", "100", "120"))],
)
def test_the_kernels_compile(architecture, tmp_path):
    try:
        cuda_build.toolchain(architecture, with_headers=False)
    except BuildError as error:
        pytest.skip(str(error))
    build_cuda.export_kernels(str(tmp_path / "casts.so"), architecture)
    listed = subprocess.run(
        ["nm", "-D", str(tmp_path / "casts.so")], capture_output=True, text=True, check=True
    ).stdout
    for name in names_on_gpus():
        assert f" T __tvm_ffi_{name}_kernel" in listed


@needs_compiler
def test_a_missing_barrier_would_be_seen(tmp_path):
    """The emulation lets threads run in any order: without barriers a row's maximum comes out wrong."""
    source = build_cuda.generated()[1].replace("__syncthreads();", "")
    library = casts_on_cpu.library(tmp_path, source)
    x = torch.arange(20 * 512.0).view(20, 512)
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(20, dtype=torch.int32)
    library["quantize_rows_float32"](x, codes, scale)
    assert not torch.equal(scale.view(torch.float32), x[:, -1] * torch.tensor(1 / 127))


@needs_compiler
def test_arguments_that_do_not_fit_are_refused_before_anything_runs():
    library = casts_on_cpu.shared()
    x, codes = torch.ones(4, 8), torch.empty(4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"S.shape\[0\]|out.shape\[0\]"):
        library["quantize_rows_float32"](x, codes, torch.empty(5, dtype=torch.int32))
    with pytest.raises(ValueError, match="device_type"):
        library._module["quantize_rows_float32"](x, codes, torch.empty(4, dtype=torch.int32))


@needs_compiler
def test_a_gpu_s_own_nan_stays_nan_in_bf16():
    """Arithmetic on a GPU makes NaN 0x7FFFFFFF, which rounds to -0 as an integer."""
    library = casts_on_cpu.shared()
    x = torch.full((2, 300), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    library["to_bf16_and_sum_float32"](x, out, torch.empty(300), torch.empty(1, 300))
    assert out.isnan().all()
    codes = torch.ones(2, 300, dtype=torch.int8)
    library["decode_rows"](codes, x[:, 0].contiguous(), out)
    assert out.isnan().all()
    sums, rows, columns = torch.ones(2, 300, dtype=torch.int32), torch.ones(2), x[0].contiguous()
    for name in ("gelu", "gelu_tanh", "relu"):
        made = (out,) if name == "relu" else (torch.empty_like(out), out)
        library[f"dequantize_{name}_bfloat16"](sums, rows, columns, torch.zeros(300), *made)
        assert all(result.isnan().all() for result in made)


def test_every_cast_that_has_a_compiled_form_is_registered_with_a_trial():
    sources = "".join(Path(module.__file__).read_text() for module in (cast_ops, epilogues))
    assert set(re.findall(r'compiled_for\(\s*"(\w+)"', sources)) - FOR_CPUS == set(autotune.REGISTERED)
    for function, trial in autotune.REGISTERED.values():
        result = function(*trial(torch.device("cpu")))
        assert autotune._difference(result, result) == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a launch on no memory would break this GPU's context")
def test_a_launch_goes_all_the_way_to_cuda():
    """Without a GPU it ends in CUDA's sentence: TVM's host code has found the functions that it calls."""
    try:
        cuda_build.toolchain("80", with_headers=False)
    except BuildError as error:
        pytest.skip(str(error))
    # In a process of its own: a null pointer would end it, and TVM, once imported, would have set it.
    launch = Path(casts_on_cpu.__file__).with_name("launch_without_gpu.py")
    done = subprocess.run([sys.executable, launch], capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError" in done.stderr and "CUDA" in done.stderr, done.stderr[
        -2000:
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    def test_every_cast_agrees_and_is_measured(self):
        device = torch.device("cuda", torch.cuda.current_device())
        for name in autotune.REGISTERED:
            autotune.library(name, device)
        for (name, _), verdict in autotune.verdicts().items():
            print(name, verdict)
            assert "ms fused" in verdict, (name, verdict)

    def test_work_is_queued_on_the_current_stream(self):
        library = compiled.library(cuda_build.architecture(torch.device("cuda")))
        x = torch.zeros(512, 4096, device="cuda")
        codes = torch.empty_like(x, dtype=torch.int8)
        scale = torch.empty(512, dtype=torch.int32, device="cuda")
        library["quantize_rows_float32"](x, codes, scale)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            x.fill_(1)
            library["quantize_rows_float32"](x, codes, scale)
        side.synchronize()
        assert (codes == 127).all()

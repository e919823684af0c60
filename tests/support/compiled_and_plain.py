"""Fixtures that run a cast in its compiled and in its plain form."""

from __future__ import annotations

import shutil

import pytest
import torch

from qsync.backend import cuda_build
from qsync.backend.casts import autotune, cast_ops
from qsync.backend.casts import compiled_casts as compiled

SHAPES = [(1, 1), (1, 257), (7, 1), (5, 7), (64, 64), (33, 1000), (130, 48), (0, 5), (3, 0)]


DTYPES = [torch.float32, torch.bfloat16]


def on_a_gpu(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def back(result):
    return tuple(map(back, result)) if isinstance(result, tuple) else result.cpu()


@pytest.fixture(scope="module")
def cuda_on_cpu():
    if shutil.which("g++") is None:
        pytest.skip("no g++ to execute the programs for GPUs with")
    import casts_on_cpu

    return casts_on_cpu.shared()


@pytest.fixture(params=["cpu", "cuda on cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def both(request, monkeypatch):
    """What the compiled and the plain form return: both(function, *arguments).

    On a CPU; with the programs for GPUs, thread by thread on a CPU; and on a GPU.
    """
    real = request.param == "cuda"
    if real and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if real:
        name = cuda_build.architecture(torch.device("cuda"))
        library = compiled.library(name)
        assert library is not None, compiled.note(name)
    elif request.param == "cpu":
        library = compiled.library()
        assert library is not None, compiled.note()
    else:
        library = request.getfixturevalue("cuda_on_cpu")

    def run(function, arguments, library):
        monkeypatch.setattr(cast_ops, "_library", lambda num_threads: library)
        monkeypatch.setattr(autotune, "library", lambda name, device: library)
        given = [on_a_gpu(a) if real else a for a in arguments]
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
        return back(function(*copies))

    return lambda function, *arguments: (run(function, arguments, library), run(function, arguments, None))


def equal(a, b):
    """Bit for bit, with NaN for NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())

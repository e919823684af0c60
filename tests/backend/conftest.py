"""Fixtures of the tests that compile for GPUs."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def compiled_fast():
    """With fewer optimizations nvcc takes half of the time; the instructions stay.

    On a machine with a GPU the kernels that the package runs are tested.
    """
    patch = pytest.MonkeyPatch()
    if (
        not torch.cuda.is_available()
        and shutil.which("nvcc")
        and "--Ofast-compile" in subprocess.check_output(["nvcc", "--help"], text=True)
    ):
        patch.setenv("NVCC_APPEND_FLAGS", "--Ofast-compile=max")
    yield
    patch.undo()

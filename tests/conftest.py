"""One thread for every test, as a rank under torchrun has: the same sums on every machine.

More would only get in each other's way here: operators are tiny, and two threads that wait for each other on
a busy machine have hung for minutes in oneDNN's conv1d (torch 2.13).
"""

from __future__ import annotations

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, too; before torch reads it

import pytest
import torch

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # what FP32 is compared with on GPUs is FP32

# Fixtures: both, cuda_on_cpu, command.
pytest_plugins = ["compiled_and_plain", "command_line"]


@pytest.fixture(autouse=True)
def _said_anew() -> None:
    """Let every test hear what a process says once."""
    coverage = sys.modules.get("qsync.runtime.coverage")
    if coverage is not None:
        coverage.say_once.cache_clear()
        coverage.warn_once.cache_clear()


@pytest.fixture(autouse=True)
def _without_accelerator() -> None:
    """Let no test find the Accelerator that another's Trainer has left to the process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def fast_products() -> None:
    """Skip a test of what AVX-512 or AMX compute on a processor that emulates all lower precisions (AVX2)."""
    from qsync.backend.precisions_that_pay import emulation_note

    if note := emulation_note(torch.device("cpu")):
        pytest.skip(note)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start ranks first, one after another, then file by file on one worker, long ones first.

    Two jobs of two ranks at once would starve each other on two cores. A file's fixtures are made once. Files
    that share what takes long to make name a group. The last file leaves the other worker idle: a short one.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            starts_ranks = item.get_closest_marker("dist") is not None
            group = "ranks" if starts_ranks else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    size = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(
        key=lambda item: (item.get_closest_marker("dist") is None, item.path not in slow, -size[item.path])
    )

"""Divide one GPU between unequal ranks by NVIDIA's Multi-Process Service (MPS).

Each rank gets a part of the multiprocessors, so both compute at the same time, the weak one slower. Without
MPS processes take turns on the whole GPU: then no rank is weak, and another process's kernels would slow all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from qsync.errors import UnsupportedError, shortened

_CONTROL = "nvidia-cuda-mps-control"
# MPS reads it when a process opens the GPU: the largest part of the multiprocessors that it gets, in %.
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_TIMEOUT_S = 30


def percentages(weak_share: float, num_ranks: int, weak_rank: int) -> list[float]:
    """Return each rank's percentage: all add up to 100, and the weak rank gets `weak_share` of another's.

    >>> percentages(0.5, 2, weak_rank=1)
    [66.7, 33.3]
    """
    parts = [weak_share if rank == weak_rank else 1.0 for rank in range(num_ranks)]
    return [round(100 * part / sum(parts), 1) for part in parts]


@contextlib.contextmanager
def served(folder: str) -> Iterator[Mapping[str, str]]:
    """Run MPS's daemon, with its files in `folder`; give the environment by which processes find it.

    Raises UnsupportedError where it is not installed or does not start.
    """
    if shutil.which(_CONTROL) is None:
        raise UnsupportedError(
            f"two ranks of one GPU need NVIDIA's MPS, and {_CONTROL} is not on the PATH; install it, or give "
            "each rank a GPU"
        )
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    started = _control(["-d"], variables)
    if started.returncode != 0:
        why = shortened(started.stdout.strip() or started.stderr.strip(), quote=False)
        raise UnsupportedError(
            f"NVIDIA's MPS did not start ({why or 'it gave no reason'}); two ranks of one GPU need it: end "
            "another one that runs, or give each rank a GPU"
        )
    try:
        yield variables
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _control([], variables, "quit\n")


def _control(
    options: list[str], variables: Mapping[str, str], said: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_CONTROL, *options], input=said, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        env={**os.environ, **variables},
    )  # fmt: skip

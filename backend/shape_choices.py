"""Choose the fastest of several ways to compute a product, once per shape; kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from qsync.backend.devices.kernel_timing import apart, fastest
from qsync.backend.devices.processor import processor
from qsync.backend.kernel_cache import Choices

TIE = 0.1


def choose(key: tuple[object, ...], runs: Sequence[Callable[[], object]]) -> int:
    """Return the index of the fastest run, timed at this machine's first call with this key.

    Another run must be 10 % faster than the first: neighbouring operators pay for a changed memory order.

    >>> runs[choose(("depthwise", *x.shape), runs)]()
    """
    known = (*key, torch.get_num_threads())
    return choices().decided(known, len(runs), lambda: apart(partial(fastest, runs, tie=TIE)))


@cache
def choices() -> Choices:
    """Return the stored choices of this machine, by shapes, memory orders and threads."""
    return Choices("shapes", {"processor": processor(), "torch": torch.__version__})

"""Booleans about a weight on a GPU, computed in one step and read in the next, without waiting."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from qsync.backend.autograd import is_replayed


class _Asked(NamedTuple):
    """A weight's version, the flag in use, and the next flag on its way to the host."""

    version: int
    decided: bool
    flag: Tensor
    arrived: torch.cuda.Event


_ASKED: MutableMapping[Tensor, _Asked] = WeakTensorKeyDictionary()


def deferred_flag(weight: Tensor, ask: Callable[[], Tensor]) -> bool:
    """Return a flag about a weight as it was before its last change; False before the first change.

    `ask` returns a boolean on the device; False must always be correct. All calls between two changes of the
    weight (a recomputed forward, several passes) get the same flag. In a CUDA graph and in a custom operator,
    which repeat a recorded run, the flag is False.
    """
    if is_replayed.get() or torch.cuda.is_current_stream_capturing():
        return False
    before = _ASKED.get(weight)
    if before is not None and before.version == weight._version:
        return before.decided
    decided = False
    if before is not None:
        before.arrived.synchronize()  # requested a step ago, so it has arrived
        decided = bool(before.flag)
    _ASKED[weight] = _Asked(weight._version, decided, *_sent(ask()))
    return decided


def _sent(answer: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Copy a boolean to the host asynchronously; return its buffer and the event of its arrival."""
    flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(answer, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return flag, arrived

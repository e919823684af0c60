"""Yes or no about a weight on a GPU, of the step before: nobody waits for the device's present work."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from qsync.backend.autograd import is_replayed


class _Asked(NamedTuple):
    """What was decided for a version of a weight, and the answer about it, on its way to the host."""

    version: int
    decided: bool
    flag: Tensor
    arrived: torch.cuda.Event


_ASKED: MutableMapping[Tensor, _Asked] = WeakTensorKeyDictionary()


def deferred_flag(weight: Tensor, ask: Callable[[], Tensor]) -> bool:
    """Return the answer about a weight as it was before its last change; no, where it has not changed yet.

    `ask` returns a boolean on the device; no must always be right. All calls between two changes of the
    weight (a recomputed forward, several passes) get one answer. In a CUDA graph and in a custom operator,
    which repeat what they once did, the answer is no.
    """
    if is_replayed.get() or torch.cuda.is_current_stream_capturing():
        return False
    before = _ASKED.get(weight)
    if before is not None and before.version == weight._version:
        return before.decided
    decided = False
    if before is not None:
        before.arrived.synchronize()  # asked a step ago: it has long arrived
        decided = bool(before.flag)
    _ASKED[weight] = _Asked(weight._version, decided, *_sent(ask()))
    return decided


def _sent(answer: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Send a boolean to the host; return where it arrives, and the event that it has."""
    flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(answer, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return flag, arrived

"""Clocks that a running step is timed with: wall time, time of an emulated device, and CUDA events."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks instants cheaply; says how long passed between two of them once the step is over."""

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None: ...


class WallClock:
    """time.perf_counter: for devices on which a call returns when its work is done."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class ShareClock:
    """Time of an emulated device that is paused and resumed: CPU time of this thread, divided by the share it
    is given.

    Wall time would put the whole of a pause on whichever operator it fell on; CPU time does not pass while
    paused.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def now(self) -> float:
        return time.thread_time()

    def seconds(self, start: float, end: float) -> float:
        return (end - start) / self.share

    def settle(self) -> None:
        pass


class CudaClock:
    """CUDA events on the current stream: a call returns before its work is done."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: torch.device, emulated_share: float | None = None) -> Clock:
    """The clock that tells the truth on this device."""
    if device.type == "cuda":
        return CudaClock()
    return ShareClock(emulated_share) if emulated_share else WallClock()

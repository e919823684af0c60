"""Clocks for a running step: wall time, time of an emulated device, and CUDA events."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from qsync.backend.gpu_state import gpu_states, why_held_down


class Clock(Protocol):
    """A clock that marks instants cheaply and tells the time between two of them once the step is over."""

    def now(self) -> Any:
        """Mark this instant."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; call `settle` first."""
        ...

    def settle(self) -> None:
        """Wait until all marks have happened."""

    def held_down(self) -> str:
        """Return why the device runs below its own clock now (heat); empty if it does not."""
        ...


class WallClock:
    """Wall time: for devices on which a call returns when its work is done."""

    def now(self) -> float:
        """Read `time.perf_counter`."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start

    def settle(self) -> None:
        """Do nothing."""

    def held_down(self) -> str:
        """Return nothing: what slows a host shows as drift."""
        return ""


class ShareClock:
    """Time of an emulated device, which is paused and resumed: CPU time of this thread over its `share`.

    Wall time would charge a whole pause to one operator. CPU time does not pass during a pause.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def now(self) -> float:
        """Read `time.thread_time`."""
        return time.thread_time()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference over the share."""
        return (end - start) / self.share

    def settle(self) -> None:
        """Do nothing."""

    def held_down(self) -> str:
        """Return nothing: what slows a host shows as drift."""
        return ""


class CudaClock:
    """CUDA events on the current stream: for devices on which a call returns before its work is done."""

    def now(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def held_down(self) -> str:
        """Ask nvidia-smi: some tens of milliseconds."""
        states = gpu_states(torch.device("cuda", torch.cuda.current_device()))
        return why_held_down(states[0]) if states else ""


def clock_for(device: torch.device, emulated_share: float | None = None) -> Clock:
    """Return the clock that measures work on this device."""
    if device.type == "cuda":
        return CudaClock()
    return ShareClock(emulated_share) if emulated_share else WallClock()

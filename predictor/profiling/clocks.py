"""Clocks for a running step: wall time, time of an emulated device, CUDA events, and launches of kernels."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from qsync.backend.devices.gpu_state import gpu_states, why_held_down
from qsync.backend.devices.kernel_timing import occupy_gpu

_AHEAD = 32  # marks that the host stays ahead of the GPU, at least: they hide the launches of one operator
_REGAINED = 3  # times as many marks that the host gets ahead while the GPU is occupied
_LEAST_S, _MOST_S = 0.001, 0.01  # of occupation; by then the GPU's queue is full, and the host waits for it


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


class _HostClock:
    """A clock that reads the host's time: a mark has happened once it is taken."""

    def settle(self) -> None:
        """Do nothing."""

    def held_down(self) -> str:
        """Return nothing: what slows a host shows as drift."""
        return ""


class WallClock(_HostClock):
    """Wall time: for devices on which a call returns when its work is done."""

    def now(self) -> float:
        """Read `time.perf_counter`."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start


class ShareClock(_HostClock):
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


class _Mark(NamedTuple):
    """An instant, and the instant from which the next interval counts."""

    arrived: Any
    left: Any


class KernelClock(CudaClock):
    """CUDA events behind work that was launched long before: what kernels take, not their launches.

    Where the host has little lead left, the GPU is given something to do until the lead is back. No interval
    counts it.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[torch.cuda.Event, float]] = deque(maxlen=_AHEAD)

    def now(self) -> Any:
        """Record an event, and another one once the GPU is occupied."""
        arrived = left = super().now()
        now_s = time.perf_counter()
        if not self._last:
            occupy_gpu(_MOST_S)
            left = super().now()
        elif self._last[0][0].query():  # type: ignore[no-untyped-call]
            per_mark_s = (now_s - self._last[0][1]) / len(self._last)
            occupy_gpu(min(_MOST_S, max(_LEAST_S, _REGAINED * _AHEAD * per_mark_s)))
            left = super().now()
        self._last.append((left, now_s))
        return _Mark(arrived, left)

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to another, without what occupied the GPU."""
        return super().seconds(start.left, end.arrived)

    def settle(self) -> None:
        """Wait for the device, which then has nothing to do."""
        super().settle()
        self._last.clear()


class LaunchClock(_HostClock):
    """Wall time of the host, which waits for the GPU at every mark: what launches take, not the kernels."""

    def now(self) -> _Mark:
        """Read the time, wait for the GPU, and read it again."""
        arrived = time.perf_counter()
        torch.cuda.synchronize()
        return _Mark(arrived, time.perf_counter())

    def seconds(self, start: _Mark, end: _Mark) -> float:
        """Return the seconds from one mark to another, without the waits at both."""
        return float(end.arrived - start.left)


def clock_for(device: torch.device, emulated_share: float | None = None) -> Clock:
    """Return the clock that measures work on this device."""
    if device.type == "cuda":
        return CudaClock()
    return ShareClock(emulated_share) if emulated_share else WallClock()

"""Clocks for a running step: wall time, time of an emulated device, CUDA events, and launches of kernels."""

from __future__ import annotations

import resource
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from qsync.backend.devices.gpu_state import gpu_states, why_held_down
from qsync.backend.devices.kernel_timing import occupy_gpu

_AHEAD = 32  # least marks by which the host must lead the GPU, to hide the launches of one operator
_REGAINED = 3  # lead to regain while the GPU is occupied / _AHEAD
_LEAST_S, _MOST_S = 0.001, 0.01  # seconds to occupy the GPU; at the most its queue is full, so the host waits


class Clock(Protocol):
    """A clock that marks instants cheaply, and returns the time between two marks after the step."""

    def now(self) -> Any:
        """Mark this instant."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; call `settle` first."""
        ...

    def settle(self) -> None:
        """Wait until the device has passed all marks."""

    def held_down(self) -> str:
        """Return the reason why the device now runs below its nominal clock (heat), or an empty text."""
        ...


class _HostClock:
    """A clock that reads the host's time, so marks need no wait."""

    def settle(self) -> None:
        """Do nothing, since marks of the host are immediate."""

    def held_down(self) -> str:
        """Return an empty text, since a slower host shows as drift."""
        return ""


class WallClock(_HostClock):
    """Wall time, for devices on which a call returns after its work is done."""

    def now(self) -> float:
        """Read `time.perf_counter`."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference of two marks."""
        return end - start


class ShareClock(_HostClock):
    """Time of an emulated slow device: this thread's CPU time divided by the device's `share` of a core.

    Emulation pauses and resumes the process. Wall time would charge a whole pause to one operator; CPU time
    does not pass during a pause.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def now(self) -> float:
        """Read `time.thread_time`."""
        return time.thread_time()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference of two marks divided by the share."""
        return (end - start) / self.share


class FaultClock(_HostClock):
    """Page faults of this thread in place of seconds: the first touch of every fresh page is one."""

    def now(self) -> int:
        """Read the thread's number of page faults that needed no disk."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def seconds(self, start: int, end: int) -> float:
        """Return the number of page faults between two marks."""
        return float(end - start)


class CudaClock:
    """CUDA events on the current stream, for devices on which a call returns before its work is done."""

    def now(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize()

    def held_down(self) -> str:
        """Return nvidia-smi's reason for a reduced clock; takes some tens of milliseconds."""
        states = gpu_states(torch.device("cuda", torch.cuda.current_device()))
        return why_held_down(states[0]) if states else ""


class _Mark(NamedTuple):
    """A mark: the end of the interval before it, and the start of the interval after it."""

    arrived: Any
    left: Any


class KernelClock(CudaClock):
    """CUDA events in a full queue, which time kernels without their launches.

    If the host's lead over the GPU gets small, filler work occupies the GPU until the lead is back. Intervals
    exclude the filler work.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[torch.cuda.Event, float]] = deque(maxlen=_AHEAD)

    def now(self) -> Any:
        """Record an event, and a second one after filler work if the host's lead is small."""
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
        """Return the seconds between two marks without filler work at the first."""
        return super().seconds(start.left, end.arrived)

    def settle(self) -> None:
        """Wait for the device, and forget the host's lead, since the queue is then empty."""
        super().settle()
        self._last.clear()


class LaunchClock(_HostClock):
    """Wall time of a host that waits for the GPU at every mark, which times launches without kernels."""

    def now(self) -> _Mark:
        """Read the time, wait for the GPU, and read the time again."""
        arrived = time.perf_counter()
        torch.cuda.synchronize()
        return _Mark(arrived, time.perf_counter())

    def seconds(self, start: _Mark, end: _Mark) -> float:
        """Return the seconds between two marks without the waits at both."""
        return float(end.arrived - start.left)


def clock_for(device: torch.device, emulated_share: float | None = None) -> Clock:
    """Return the clock that measures work on this device."""
    if device.type == "cuda":
        return CudaClock()
    return ShareClock(emulated_share) if emulated_share else WallClock()

"""The events of torch's allocator on a CPU: every allocation and every free, in order."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

ALLOCATOR = "[memory]"  # the profiler's name of allocator events
_NOISY = (b"ActivityProfiler", b"CPUAllocator.cpp")  # names of torch's files in unwanted log lines


@contextlib.contextmanager
def allocator_events(marks: str = "") -> Iterator[list[tuple[str, int]]]:
    """Collect (name, bytes) of allocations (negative: frees) and of events whose names begin with `marks`."""
    found: list[tuple[str, int]] = []
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    for event in events:
        name = event.name()
        if name == ALLOCATOR:
            found.append((name, event.nbytes()))
        elif marks and name.startswith(marks):
            found.append((name, 0))


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Suppress log lines of torch's profiler on file descriptor 2 within the context."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not any(file in line for file in _NOISY):
                    os.write(2, line)

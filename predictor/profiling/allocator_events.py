"""The events of torch's allocator on a CPU: every allocation and every free, in order."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

ALLOCATOR = "[memory]"  # as the profiler names its events
_NOISY = (b"ActivityProfiler", b"CPUAllocator.cpp")  # files of torch, in the lines that they write


@contextlib.contextmanager
def allocator_events(marks: str = "") -> Iterator[list[tuple[str, int]]]:
    """Collect (name, bytes) of the allocations (negative: frees) inside, and of events that begin so."""
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
    """Leave out what torch's profiler writes to file descriptor 2: start, stop, blocks from before."""
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

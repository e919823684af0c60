"""The emulated inference device: a rank gets a share of its core, by being paused and resumed every few ms.

Kernels, types and messages are real, only slower by a known factor, and every output that stems from such a
rank says "emulated". Linux only: it needs signals, CPU affinity and a death signal for the helper.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from qsync import QSyncError
from qsync.errors import UnsupportedError
from qsync.experiments.harness import pausing

_STOP_TIMEOUT_S = 5.0


def pin_to_core(local_rank: int) -> int:
    """Bind every thread of this process to one of its cores, counted by `local_rank`; return the core.

    Threads that start later inherit it. Raises UnsupportedError where processes cannot be bound to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError("this system cannot bind a process to a core; run the emulation on Linux")
    cores = sorted(os.sched_getaffinity(0))
    core = cores[local_rank % len(cores)]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread), {core})
    return core


class Throttle:
    """Gives this process `share` of its core, 0 < share <= 1, while its body runs; at 1 nothing is paused.

    The helper dies with this process, however that dies, and this process runs on, however the helper dies.
    Raises QSyncError for a share out of (0, 1].
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:  # NaN lands here too
            raise QSyncError(
                f"a rank's share of its core must lie above 0 and not above 1, found {share}; give e.g. 0.5"
            )
        self.share = share
        self._helper: subprocess.Popen[bytes] | None = None

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper while it runs."""
        return self._helper.pid if self._helper else None

    def __enter__(self) -> Throttle:
        """Start pausing; return when the first cycle has begun. UnsupportedError if the helper cannot run."""
        if self.share == 1:
            return self
        if not sys.platform.startswith("linux"):
            raise UnsupportedError("an emulated device needs Linux; use --weak-share 1 on this system")
        # -I -S: nothing of the user's environment, so that the helper is there within 20 ms. It inherits our
        # core. A session of its own keeps Ctrl-C from ending it before us.
        command = [sys.executable, "-I", "-S", pausing.__file__, str(os.getpid()), repr(self.share)]
        self._helper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self._helper.stdout and self._helper.stderr
        if self._helper.stdout.readline() != b"ready\n":
            reason = self._helper.stderr.read().decode(errors="replace").strip().splitlines()
            self.__exit__()
            raise UnsupportedError(
                f"the emulated device's helper did not start ({reason[-1] if reason else 'no message'}); "
                "use --weak-share 1, or a system that allows prctl and signals"
            )
        return self

    def __exit__(self, *error: object) -> None:
        """Stop pausing; this process runs on at full speed."""
        helper, self._helper = self._helper, None
        if helper is None:
            return
        helper.terminate()
        try:
            helper.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.wait()
        for stream in (helper.stdout, helper.stderr):
            if stream:
                stream.close()


def busy_share(duration_s: float) -> float:
    """Return CPU time over wall time of this thread while it does nothing but spin."""
    wall, cpu = time.monotonic(), time.thread_time()
    while time.monotonic() - wall < duration_s:
        pass
    return (time.thread_time() - cpu) / (time.monotonic() - wall)

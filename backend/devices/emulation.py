"""Emulate a slower device: pause and resume a rank every few ms, so that it gets a share of its core.

Kernels, types and messages are real, only slower by a known factor; every output of such a rank is marked
"emulated". Linux only: it needs signals, CPU affinity and a death signal for the helper. A process is slowed
only once: after an experiment has slowed its rank and declared the share, `slow_down` adds nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import time

import torch

from qsync.backend.devices import pausing
from qsync.errors import FormatError, QSyncError, UnsupportedError

_STOP_TIMEOUT_S = 5.0
_WHOLE = "leave emulated_share out (--weak-share 1 of qsync demo)"


def pin_to_core(local_rank: int) -> int:
    """Bind every thread of this process to the core of index `local_rank`; return the core.

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


def slow_down(device: torch.device, share: float) -> None:
    """Slow this process to `share` of its core until it ends, unless it already is.

    Raises UnsupportedError on a GPU, which keeps working while its process is paused, and where processes
    cannot be paused; FormatError if this process is already slowed to another share.
    """
    is_declared = _slowed.by is not None and _slowed.asked is None
    if device.type != "cpu" and share < 1 and not is_declared:
        raise UnsupportedError(
            f"emulated_share works on CPUs only: a {device.type} device keeps working while its process is "
            "paused; leave it out"
        )
    if _slowed.by is not None:
        if _slowed.asked not in (None, share):
            raise FormatError(
                f"emulated_share is {share:.4g}, but an earlier call set {_slowed.asked:.4g} for "
                "this process; give the same value in every call"
            )
        return
    throttle = Throttle(share)
    throttle.__enter__()
    _slowed.asked = share if share < 1 else None
    atexit.register(throttle.__exit__)


def slowed_otherwise(share: float) -> None:
    """Declare that other means already slow this process to a share of its core or GPU."""
    _slowed.by = Throttle(share)


class _Slowed:
    """The requested and the measured share of a slowed process.

    A busy machine makes the measured share smaller.
    """

    by: Throttle | None = None
    asked: float | None = None


_slowed = _Slowed()


class Throttle:
    """Limit this process to `share` of its core, 0 < share <= 1, inside the context.

    At 1 nothing is paused. The helper dies with this process in every case, and this process runs on if the
    helper dies. Raises QSyncError for a share outside (0, 1].
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:  # also catches NaN
            raise QSyncError(
                f"a rank's share of its core must be above 0 and at most 1, found {share}; give e.g. 0.5"
            )
        self.share = share
        self._helper: subprocess.Popen[bytes] | None = None

    @property
    def helper_pid(self) -> int | None:
        """Return the process id of the helper while it runs."""
        return self._helper.pid if self._helper else None

    def __enter__(self) -> Throttle:
        """Start pausing; return once the first cycle has begun. Raises UnsupportedError on failure."""
        if self.share == 1:
            return self
        self._check()
        # -I -S: ignore the user's environment, so that the helper starts within 20 ms. It inherits our core.
        # A session of its own keeps Ctrl-C from ending it before us.
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
                f"{_WHOLE}, or use a system that allows prctl and signals"
            )
        _slowed.by = self
        return self

    def _check(self) -> None:
        """Raise UnsupportedError where pauses cannot work, or would stop a shell's job."""
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(f"an emulated device needs Linux; {_WHOLE} on this system")
        if os.getpid() == 1:
            raise UnsupportedError(
                f"the first process of a container cannot be paused; start it by torchrun, or {_WHOLE}"
            )
        if os.getppid() == os.getsid(0) and _has_terminal():
            raise UnsupportedError(
                "a shell treats a paused child as a stopped job; start an emulated device by torchrun, or "
                "put `setsid -w` in front of the command"
            )

    def __exit__(self, *error: object) -> None:
        """Stop pausing; this process runs on at full speed."""
        helper, self._helper = self._helper, None
        if helper is None:
            return
        if _slowed.by is self:
            _slowed.by = None
        helper.terminate()
        try:
            helper.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.wait()
        for stream in (helper.stdout, helper.stderr):
            if stream:
                stream.close()


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False


def busy_share(duration_s: float) -> float:
    """Return the ratio of CPU time to wall time of this thread in a busy loop."""
    wall, cpu = time.monotonic(), time.thread_time()
    while time.monotonic() - wall < duration_s:
        pass
    return (time.thread_time() - cpu) / (time.monotonic() - wall)

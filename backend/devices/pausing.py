"""Pause and resume a rank, as a process: `python pausing.py PID SHARE`. Standard library only.

It imports neither torch nor qsync: it must be ready within milliseconds and must stay small enough to cost
the rank's core nothing. `emulation.py` starts it by its path, from inside the rank.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

# Seconds of a pause: short against a step, whose time else depends on where pauses fall; long against a
# pause's overhead.
PAUSE_S = 0.004
LONGEST_PAUSE_S = 3 * PAUSE_S
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


def main(pid: int, share: float) -> None:
    """Limit the parent process `pid` to `share` of the time, until either dies; leave it running."""
    stop_with_parent(pid)
    resume_when_this_dies(pid)
    raise_priority()
    try:
        with contextlib.suppress(ProcessLookupError):  # the rank is gone: there is nobody to pause
            alternate(pid, share)
    finally:
        resume(pid)


def alternate(pid: int, share: float) -> None:
    """Alternate pauses of PAUSE_S with runs of PAUSE_S * share / (1 - share), and correct late wake-ups.

    A helper that wakes late lets the rank run too long, or keeps it stopped too long. Each pause is chosen so
    that after it the rank has been stopped for exactly (1 - share) of the time since the start.
    """
    run_s = PAUSE_S * share / (1 - share)
    start = time.monotonic()
    stopped_s = 0.0
    announce()
    while True:
        time.sleep(run_s)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        wanted_s = ((1 - share) * (stopped_at - start) - stopped_s) / share
        if wanted_s > LONGEST_PAUSE_S:
            # The whole machine stood still for a while. Start anew: one long pause would disturb more.
            start, stopped_s, wanted_s = stopped_at - run_s, 0.0, PAUSE_S
        keep_core_awake(stopped_at + wanted_s)
        os.kill(pid, signal.SIGCONT)
        stopped_s += time.monotonic() - stopped_at


def keep_core_awake(until: float) -> None:
    """Wait without sleeping: a core that idles is slow when it comes back.

    With a sleep here the rank's CPU time per step grew by 12 to 33 % (ResNet, FP32, one virtual core of an
    AMD EPYC): the host lowers an idle core's clock or lends it out. With this loop it stayed within its
    noise, so half a core is half as fast.
    """
    while time.monotonic() < until:
        pass


def announce() -> None:
    """Tell the rank that the first cycle begins."""
    os.write(1, b"ready\n")
    os.close(1)


def stop_with_parent(pid: int) -> None:
    """Ask for SIGTERM when the parent dies, exit on SIGTERM, and wake up as precisely as possible."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds; the default is 50 microseconds
    if os.getppid() != pid:
        sys.exit(0)  # the parent died before the death signal was set


def resume_when_this_dies(pid: int) -> None:
    """Fork a watcher that resumes the rank even if this process is killed during a pause."""
    held, watched = os.pipe()
    if os.fork() != 0:
        os.close(held)
        return  # `watched` stays open while this process lives
    os.close(watched)
    os.close(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.read(held, 1)  # returns when the last process that holds the other end dies
    resume(pid)
    os._exit(0)


def resume(pid: int) -> None:
    """Resume the rank."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def raise_priority() -> None:
    """Raise our priority above the rank's if allowed; otherwise `alternate` corrects the delays."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-20)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

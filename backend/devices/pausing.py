"""The process that pauses and resumes a rank: `python pausing.py PID SHARE`. Standard library only.

It imports neither torch nor qsync: it must be ready within milliseconds and must stay small enough to cost
the rank's core nothing. `emulation.py` starts it by its path, from inside the rank.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

# Short against a step, which else comes out longer or shorter by where its pauses fall; long against what a
# pause costs.
PAUSE_S = 0.004
LONGEST_PAUSE_S = 3 * PAUSE_S
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


def main(pid: int, share: float) -> None:
    """Give process `pid`, our parent, `share` of the time, until one of us dies. It is left running."""
    stop_with_parent(pid)
    resume_when_this_dies(pid)
    raise_priority()
    try:
        with contextlib.suppress(ProcessLookupError):  # the rank is gone, and nobody is left to pause
            alternate(pid, share)
    finally:
        resume(pid)


def alternate(pid: int, share: float) -> None:
    """Pause for PAUSE_S, run for PAUSE_S * share / (1 - share), and so on, correcting for every late wake-up.

    A helper that wakes late lets the rank run too long, or keeps it stopped too long. The achieved share is
    counted, and each pause is chosen so that after it the rank has been stopped for exactly (1 - share) of
    the time since the start.
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
            # The whole machine stood still for a while; one long pause would only disturb more. Start anew.
            start, stopped_s, wanted_s = stopped_at - run_s, 0.0, PAUSE_S
        keep_core_awake(stopped_at + wanted_s)
        os.kill(pid, signal.SIGCONT)
        stopped_s += time.monotonic() - stopped_at


def keep_core_awake(until: float) -> None:
    """Wait without sleeping: a core that idles is slow when it comes back.

    With a sleep here the rank's CPU time per step grew by 12 to 33 % (ResNet, FP32, one virtual core of an
    AMD EPYC): the host lowers an idle core's clock or lends it out. With this loop it stayed within what it
    varies by anyway, so that half a core is half as fast.
    """
    while time.monotonic() < until:
        pass


def announce() -> None:
    """Tell the rank that the cycle begins."""
    os.write(1, b"ready\n")
    os.close(1)


def stop_with_parent(pid: int) -> None:
    """Arrange for SIGTERM when the parent dies, for exit on SIGTERM, and for the sharpest wake-ups."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds; 50 microseconds otherwise
    if os.getppid() != pid:
        sys.exit(0)  # it died before the death signal was set


def resume_when_this_dies(pid: int) -> None:
    """Leave a watcher behind that resumes the rank even if this process is killed during a pause."""
    held, watched = os.pipe()
    if os.fork() != 0:
        os.close(held)
        return  # `watched` stays open for as long as this process lives
    os.close(watched)
    os.close(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.read(held, 1)  # returns when the last holder of the other end is gone
    resume(pid)
    os._exit(0)


def resume(pid: int) -> None:
    """Let the rank run again."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def raise_priority() -> None:
    """Preempt the rank at once where the system lets us; elsewhere `alternate` corrects for the delay."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-20)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

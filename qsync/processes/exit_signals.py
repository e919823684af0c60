"""End a program on a signal so that it ends its child processes and removes temporary folders."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from types import FrameType

# Seconds between repeats: some libraries swallow every exception, so it is raised until the program ends.
_AGAIN_S = 5.0


def exit_on_signals() -> None:
    """Exit on SIGTERM and SIGHUP with the exit code of shells, 128 + the signal's number.

    A signal that is ignored stays ignored, as nohup asks. Does nothing outside of the main thread. For
    programs, not for libraries.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    def again(*_: object) -> None:
        sys.exit(128 + number)

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        # While Python shuts down it has no handlers, and an alarm would kill the process.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
    sys.exit(128 + number)

"""The emulated device: a true share of the core, and no process left stopped or behind, however one of them
dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qsync.backend.devices import pausing
from qsync.backend.devices.emulation import Throttle
from qsync.errors import QSyncError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the emulation is for Linux")

RANK = """
import sys
from qsync.backend.devices.emulation import Throttle, busy_share, pin_to_core
pin_to_core(0)
throttle = Throttle(float(sys.argv[1]))
throttle.__enter__()
print(throttle.helper_pid, flush=True)
while True:
    print(busy_share(1.0), flush=True)
"""


@contextlib.contextmanager
def throttled_rank(share: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A throttled process of its own, and the process id of its helper."""
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(share)], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout
        yield rank, int(rank.stdout.readline())
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()


def state(pid: int) -> str:
    """R, S, T (stopped), Z ... or "gone"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_rank_gets_no_more_than_its_share():
    with throttled_rank(0.3) as (rank, _):
        # Where the helper waits long for its core it starts anew: such a window shows no share.
        assert any(float(rank.stdout.readline()) <= 1.2 * 0.3 for _ in range(60))


class LateClock:
    """A clock of a loaded machine: whoever sleeps or waits goes on up to 2 ms late."""

    def __init__(self) -> None:
        self.now, self.random = 0.0, random.Random(0)

    def monotonic(self) -> float:
        self.now += 1e-6 if self.random.random() < 0.99 else self.random.uniform(0.0, 0.002)
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.random.uniform(0.0, 0.002)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_pauses_make_up_the_rest_however_late_the_helper_wakes(share, monkeypatch):
    clock, sent = LateClock(), []

    def kill(pid: int, number: int) -> None:
        sent.append(clock.now)  # a stop, a resume, and so on
        if len(sent) == 2000:
            raise ProcessLookupError

    monkeypatch.setattr(pausing, "time", clock)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(pausing, "announce", lambda: None)
    with pytest.raises(ProcessLookupError):
        pausing.alternate(0, share)
    stopped_s = sum(resumed - stop for stop, resumed in zip(sent[::2], sent[1::2], strict=True))
    assert 1 - stopped_s / clock.now == pytest.approx(share, abs=0.01)


def test_a_killed_rank_takes_its_helper_along():
    with throttled_rank(0.5) as (rank, helper):
        assert state(helper) != "gone"
        rank.kill()
        rank.wait()
        assert wait_until(lambda: state(helper) in ("gone", "Z"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_runs_on_when_its_helper_dies(how):
    with throttled_rank(0.1) as (rank, helper):  # at 0.1 it would most likely be caught stopped
        os.kill(helper, how)
        assert wait_until(lambda: state(helper) in ("gone", "Z"))
        time.sleep(0.1)
        assert all(state(rank.pid) != "T" for _ in range(1000))


STOPPED = """
import os
from qsync.backend.devices.emulation import Throttle, busy_share
with Throttle(0.2) as throttle:
    helper, slow = throttle.helper_pid, busy_share(0.5)
print(os.path.exists(f"/proc/{helper}"), throttle.helper_pid)
print(any(busy_share(0.3) > 1.5 * slow for _ in range(100)))
"""


def test_stop_gives_the_whole_core_back_and_leaves_no_process():
    output = subprocess.check_output([sys.executable, "-c", STOPPED], text=True)
    assert output.split() == ["False", "None", "True"]


ONCE = """
import os
from pathlib import Path
import torch
from qsync.backend.devices.emulation import Throttle, _slowed, slow_down, slowed_otherwise
from qsync.errors import QSyncError

def helpers():
    (thread,) = [t for t in Path("/proc/self/task").iterdir() if t.name == str(os.getpid())]
    return len((thread / "children").read_text().split())

def refused(device, share):
    try:
        slow_down(torch.device(device), share)
    except QSyncError as error:
        print(error)

cpu = torch.device("cpu")
with Throttle(0.5):  # as the demo's weak rank
    slow_down(cpu, 0.493)  # what it measured
    slow_down(cpu, 0.31)  # on a busy machine
    print(helpers())
slowed_otherwise(0.5)
slow_down(cpu, 0.5)
slow_down(torch.device("cuda"), 0.5)  # a part of a GPU
print(helpers())
_slowed.by = None
slow_down(cpu, 0.5)
slow_down(cpu, 0.5)  # a second model of the same rank
print(helpers())
refused("cpu", 0.25)
refused("cuda", 0.5)
"""


def test_a_process_is_slowed_once_whoever_asks():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ONCE], capture_output=True, text=True, check=True
    )
    *counts, other, gpu = done.stdout.splitlines()
    assert counts == ["1", "0", "1"] and not done.stderr  # nor does the helper outlive it unreaped
    assert "emulated_share is 0.25, but an earlier call set 0.5 for this process" in other
    assert "works on CPUs only: a cuda device keeps working" in gpu


def test_a_shell_that_would_take_the_rank_for_stopped_is_named():
    code = "from qsync.backend.devices.emulation import Throttle; Throttle(0.5).__enter__()"
    leader, follower = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "-i"], stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(follower)
    os.write(leader, f"{sys.executable} -c '{code}' 2>&1 | tail -1; exit\n".encode())
    shell.wait()
    said = os.read(leader, 100_000).decode()
    os.close(leader)
    assert "put `setsid -w` in front of the command" in " ".join(said.split())


def test_a_whole_share_needs_no_helper():
    with Throttle(1.0) as throttle:
        assert throttle.helper_pid is None


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(QSyncError, match="must be above 0 and at most 1"):
        Throttle(share)


def test_every_thread_is_pinned_to_a_core_counted_within_those_allowed():
    code = (
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "from qsync.backend.devices.emulation import pin_to_core\n"
        "cores = os.sched_getaffinity(0)\n"
        "core = pin_to_core(len(cores))\n"
        "threads = os.listdir('/proc/self/task')\n"
        "print(core == min(cores), all(os.sched_getaffinity(int(t)) == {core} for t in threads))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "True"]


def test_the_helper_imports_neither_torch_nor_qsync():
    code = (
        "import runpy, sys; from pathlib import Path\n"
        "runpy.run_path(sys.argv[1], run_name='pausing')\n"
        "print(any(name.split('.')[0] in ('torch', 'qsync') for name in sys.modules))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code, pausing.__file__]
    assert subprocess.check_output(command, text=True).strip() == "False"

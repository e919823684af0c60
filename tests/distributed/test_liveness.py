"""A rank that dies is named by the others, in time; a rank that ends well alarms nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from qsync.distributed.monitoring import liveness
from qsync.distributed.monitoring.liveness import Pulses
from qsync.errors import QSyncError

TIMEOUT_S = 2

HEADER = f"""
import os, signal, sys, time
import torch, torch.distributed as dist
from qsync.distributed.monitoring import liveness
dist.init_process_group("gloo")
rank = dist.get_rank()
watch = liveness.start(timeout_s={TIMEOUT_S})
dist.barrier()
"""
SLEEP = "time.sleep(600)\n"
REDUCE = "for _ in range(10**6): dist.all_reduce(torch.ones(10)); time.sleep(0.01)\n"


def run_ranks(*bodies: str, awaited: tuple[int, ...] = (0, 1)) -> list[tuple[int, str]]:
    """Exit code and output of each awaited rank: plain processes, so that no agent ends the survivors."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HEADER + body],
            env={**common, "RANK": str(rank), "WORLD_SIZE": str(len(bodies))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, body in enumerate(bodies)
    ]
    try:
        outputs = {rank: ranks[rank].communicate(timeout=120)[0] for rank in awaited}
        return [(ranks[rank].returncode, output) for rank, output in outputs.items()]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.dist
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("busy", [REDUCE, SLEEP])
def test_a_dead_rank_is_named(how, busy):
    dies = f"time.sleep(0.5); os.kill(os.getpid(), {int(how)}); time.sleep(60)"
    ((code, output),) = run_ranks(busy, dies, awaited=(0,))
    assert code not in (0, None)
    assert "rank 1 (" in output
    assert "stopped responding" in output
    assert "look at the output of rank 1" in output


@pytest.mark.dist
def test_a_rank_that_ends_its_loop_early_is_named():
    (code, output), _ = run_ranks(REDUCE, "time.sleep(0.5)")
    assert code not in (0, None)
    assert "finished before rank 0, so a collective with it fails" in output
    assert "rank 1 (" in output


@pytest.mark.dist
def test_the_end_of_the_rank_that_serves_the_store_is_noticed():
    dies = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    ((code, output),) = run_ranks(dies, SLEEP, awaited=(1,))
    assert code == liveness.EXIT_CODE
    assert "lost the rendezvous store" in output and "rank 0 (" in output


@pytest.mark.dist
def test_a_rank_that_leaves_with_an_error_is_quoted():
    leaves = "with watch:\n    raise ValueError('NaN in the loss')\n"
    (code, output), (other_code, other) = run_ranks(SLEEP, leaves)
    assert code == liveness.EXIT_CODE and other_code == 1
    assert "left with an error (ValueError: NaN in the loss), so rank 0 stops too" in output
    assert "stops" not in other


@pytest.mark.dist
def test_an_exception_nobody_caught_is_quoted_too():
    (code, output), _ = run_ranks(SLEEP, "raise ValueError('NaN in the loss')")
    assert code == liveness.EXIT_CODE
    assert "left with an error (ValueError: NaN in the loss)" in output


@pytest.mark.dist
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("farewell", ["watch.finish()", "pass"])
def test_a_rank_that_finishes_early_alarms_nobody(early, farewell):
    bodies = [f"time.sleep({TIMEOUT_S + 1.5})"] * 2
    bodies[early] = farewell
    for code, output in run_ranks(*bodies):
        assert code == 0
        assert "stops" not in output


def test_alone_nothing_is_watched():
    with liveness.start(timeout_s=1) as watch:
        assert not [thread for thread in threading.enumerate() if "qsync liveness" in thread.name]
    watch.finish()


@pytest.mark.parametrize("timeout_s", [0, -1, 0.5, float("nan")])
def test_a_timeout_too_short_is_refused(timeout_s):
    with pytest.raises(QSyncError, match="at least 1 s"):
        liveness.start(timeout_s)


def test_pulses_name_the_longest_silent_first():
    pulses = Pulses([1, 2, 3], now_s=0, patience_s=5)
    pulses.hear(1, {1: "1", 2: "1", 3: "1"})
    pulses.hear(4, {1: "2", 2: "1", 3: "1"})
    pulses.hear(7, {1: "3", 2: "1", 3: "2"})
    assert pulses.silent(8, timeout_s=3) == [2]
    assert pulses.silent(11, timeout_s=3) == [2, 1, 3]
    pulses.forget(2)
    assert pulses.silent(8, timeout_s=3) == []


def test_a_rank_that_never_began_is_silent_too():
    assert Pulses([1], now_s=0, patience_s=5).silent(31, timeout_s=30) == [1]


def test_nobody_is_judged_by_time_in_which_we_stood_still():
    pulses = Pulses([1], now_s=0, patience_s=5)
    pulses.hear(1, {1: "1"})
    pulses.hear(100, {1: "1"})
    assert pulses.silent(100, timeout_s=30) == []
    assert pulses.silent(131, timeout_s=30) == [1]

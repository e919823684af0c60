"""A rank that dies is named by the others, in time; a rank that ends well alarms nobody."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from two_ranks import start_ranks

from qsync.distributed.job_address import JobAddress
from qsync.distributed.monitoring import liveness
from qsync.distributed.monitoring.positions import (
    AFTER_BACKWARD,
    BACKWARD,
    BEFORE_FORWARD,
    EarlyEnd,
    Position,
)
from qsync.distributed.monitoring.pulses import Pulses
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
SUSPENDED = (
    "import subprocess; me = os.getpid(); "
    "subprocess.Popen(['sh', '-c', f'kill -STOP {me}; sleep 1.5; kill -CONT {me}'])"
)
REDUCE = "for _ in range(10**6): dist.all_reduce(torch.ones(10)); time.sleep(0.01)\n"
# With beats so rare, a rank that waited for one would end a minute later.
RARE = """
liveness._INTERVAL_S = 30.0
watch = liveness.start(timeout_s=300)
store = dist.distributed_c10d._get_default_store()
dist.barrier()
def ends():
    began_s = time.monotonic()
    watch.finish()
    print(f"ends in {time.monotonic() - began_s:.3f} s")
    store.set(f"ended {rank}", "1")
"""
JOIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
import qsync
from qsync.distributed import job, job_address
from qsync.distributed.monitoring import liveness
liveness.TOLD_S = job_address.TOLD_S = 0.5
rank = int(os.environ["RANK"])
"""
HYBRID = "qsync.hybrid(torch.nn.Linear(2, 2), torch.ones(2, 2), lambda m, b: m(b).sum(), join_timeout_s=3)"
STANDS = f"""
from qsync.distributed.monitoring.positions import AFTER_BACKWARD, Position
class Loop:
    def where(self):
        return Position(3, PHASE, 4, False)
loop = Loop()
liveness.follow(loop.where)
time.sleep({3 * TIMEOUT_S} if rank == 0 else 0)
"""


def dies(how: signal.Signals) -> str:
    return f"time.sleep(0.5); os.kill(os.getpid(), {int(how)}); time.sleep(60)"


def ends_first(first: int) -> list[str]:
    bodies = ["ends(); store.wait(['ended 0', 'ended 1'])"] * 2
    bodies[1 - first] = f"store.wait(['ended {first}']); time.sleep(0.2); " + bodies[1 - first]
    return bodies


def finishes_first(first: int, farewell: str) -> list[str]:
    bodies = [f"time.sleep({TIMEOUT_S + 1.5})"] * 2
    bodies[first] = farewell
    return bodies


@dataclass(frozen=True)
class Job:
    """What each rank runs after the header; a rank without a body never starts."""

    bodies: Sequence[str | None]
    awaited: tuple[int, ...] = (0, 1)
    header: str = HEADER


DEATHS = list(itertools.product((signal.SIGKILL, signal.SIGSTOP), (REDUCE, SLEEP)))
FAREWELLS = list(itertools.product((0, 1), ("watch.finish()", "pass")))
JOINS = f"job.join_job(torch.device('cpu'), silence_s={TIMEOUT_S})"
JOBS = {
    **{("dies", *case): Job([case[1], dies(case[0])], awaited=(0,)) for case in DEATHS},
    **{("finishes", *case): Job(finishes_first(*case)) for case in FAREWELLS},
    **{("rare", first): Job(ends_first(first), header=HEADER.split("watch =")[0] + RARE) for first in (0, 1)},
    # Rank 1 runs again 1.2 s after rank 0 ends: longer than four beats, shorter than the timeout.
    "reads late": Job(["time.sleep(0.3); watch.finish()", f"{SUSPENDED}; time.sleep({TIMEOUT_S + 1.5})"]),
    "ends its loop": Job([REDUCE, "time.sleep(0.5)"]),
    "serves the store": Job([dies(signal.SIGKILL), SLEEP], awaited=(1,)),
    "leaves": Job([SLEEP, "with watch:\n    raise ValueError('NaN in the loss')\n"]),
    "raises": Job([SLEEP, "raise ValueError('NaN in the loss')"]),
    "never comes": Job([HYBRID, None], awaited=(0,), header=JOIN),
    "never serves": Job([None, HYBRID], awaited=(1,), header=JOIN),
    # The third rank never comes, so that all are still joining.
    "dies joining": Job(
        [JOINS, f"liveness.Watch._hear_bell = lambda watch: os.kill(os.getpid(), 9); {JOINS}", None],
        awaited=(0,), header=JOIN,
    ),
    "dies unwatched": Job(
        [f"liveness.start({TIMEOUT_S}, join_timeout_s=3); time.sleep(600)", "os.kill(os.getpid(), 9)"],
        awaited=(0,), header=JOIN + "dist.init_process_group('gloo')\n",
    ),
    "agrees": Job(
        ["from qsync.distributed.agreement import agree; agree('planning', int)", dies(signal.SIGKILL)],
        awaited=(0,),
    ),
    "waits": Job([STANDS.replace("PHASE", "AFTER_BACKWARD if rank == 0 else 0")] * 2),
    "evaluates": Job([STANDS.replace("PHASE", "0")] * 2),
}  # fmt: skip


def run(job: Job, folder: Path) -> list[tuple[int | None, str]]:
    """Exit code and output of each awaited rank: plain processes, so that no agent ends the survivors."""
    scripts = [folder / f"{rank}.py" if body else None for rank, body in enumerate(job.bodies)]
    for script, body in zip(scripts, job.bodies, strict=True):
        if script is not None:
            script.write_text(f"{job.header}{body}")
    ranks = start_ranks(scripts, folder)
    try:
        return [ranks[rank].ended(120) for rank in job.awaited]
    finally:
        for rank in ranks.values():
            rank.kill()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What became of a job of `JOBS`: some run at a time, since all of them wait most of their time."""
    with ThreadPoolExecutor(6) as pool:
        outcomes = {
            name: pool.submit(run, job, tmp_path_factory.mktemp("ranks")) for name, job in JOBS.items()
        }
        yield lambda name: outcomes[name].result()


@pytest.mark.dist
@pytest.mark.parametrize("case", DEATHS)
def test_a_dead_rank_is_named(outcome, case):
    ((code, output),) = outcome(("dies", *case))
    assert code not in (0, None)
    assert "rank 1 (" in output
    assert "stopped responding" in output
    assert "look at the output of rank 1" in output


@pytest.mark.dist
def test_a_rank_that_ends_its_loop_early_is_named(outcome):
    (code, output), _ = outcome("ends its loop")
    assert code not in (0, None)
    assert "finished before rank 0, so a collective with it fails" in output
    assert "rank 1 (" in output


@pytest.mark.dist
def test_the_end_of_the_rank_that_serves_the_store_is_noticed(outcome):
    ((code, output),) = outcome("serves the store")
    assert code == liveness.EXIT_CODE
    assert "lost the rendezvous store" in output and "rank 0 (" in output


@pytest.mark.dist
def test_a_rank_that_leaves_with_an_error_is_quoted(outcome):
    (code, output), (other_code, other) = outcome("leaves")
    assert code == liveness.EXIT_CODE and other_code == 1
    assert "left with an error (ValueError: NaN in the loss), so rank 0 stops too" in output
    assert "stops" not in other


@pytest.mark.dist
def test_an_exception_nobody_caught_is_quoted_too(outcome):
    (code, output), _ = outcome("raises")
    assert code == liveness.EXIT_CODE
    assert "left with an error (ValueError: NaN in the loss)" in output


@pytest.mark.dist
@pytest.mark.parametrize("case", FAREWELLS)
def test_a_rank_that_finishes_early_alarms_nobody(outcome, case):
    for code, output in outcome(("finishes", *case)):
        assert code == 0
        assert "stops" not in output


@pytest.mark.dist
def test_the_rank_that_serves_the_store_waits_until_a_slow_one_has_read(outcome):
    for code, output in outcome("reads late"):
        assert code == 0 and "stops" not in output, output


@pytest.mark.dist
@pytest.mark.parametrize("first", [0, 1])
def test_no_rank_waits_for_a_beat_at_its_end(outcome, first):
    for code, output in outcome(("rare", first)):
        assert code == 0, output
        assert float(output.split("ends in ")[1].split()[0]) < 15, output


@pytest.mark.dist
def test_a_rank_that_never_comes_is_waited_for_by_name_and_ends_the_job(outcome):
    ((code, output),) = outcome("never comes")
    assert code == liveness.EXIT_CODE, output
    assert output.count("s for rank 1 to join") >= 2
    assert "rank 1 did not join within 3 s, so rank 0 stops; look at the output of rank 1" in output


@pytest.mark.dist
def test_the_rank_that_serves_the_store_is_waited_for_by_name_too(outcome):
    ((code, output),) = outcome("never serves")
    assert code == 1
    assert output.count("s for rank 0, which serves the rendezvous store at 127.0.0.1:") >= 3
    assert "QSyncError: rank 1 has waited" in output and "look at the output of rank 0" in output


@pytest.mark.dist
def test_a_rank_that_dies_while_others_join_is_named(outcome):
    ((code, output),) = outcome("dies joining")
    assert code == liveness.EXIT_CODE, output
    assert "rank 1 (" in output and "stopped responding" in output


@pytest.mark.dist
def test_a_rank_that_dies_between_its_group_and_its_watch_is_named(outcome):
    ((code, output),) = outcome("dies unwatched")
    assert code == liveness.EXIT_CODE, output
    assert "s for rank 1 to join" in output and "rank 1 did not join within 3 s" in output


@pytest.mark.dist
def test_a_rank_that_dies_before_it_agrees_is_an_error_of_qsync_and_is_named(outcome):
    ((code, output),) = outcome("agrees")
    assert code not in (0, None)
    assert "QSyncError: planning: another rank ended meanwhile" in output and "rank 1 (" in output


@pytest.mark.dist
@pytest.mark.parametrize(("job", "is_named"), [("waits", True), ("evaluates", False)])
def test_a_rank_that_ended_steps_ago_is_named_by_one_that_stands_still_in_the_next(outcome, job, is_named):
    """So it is under NCCL, where no exchange fails. A rank that stands still after as many steps may."""
    (_, output), (code, _) = outcome(job)
    assert code == 0
    assert ("finished before rank 0, so a collective with it fails" in output) is is_named
    assert ("(rank 0 has been after backward of step 3 for 2 s)" in output) is is_named


@pytest.mark.parametrize(("name", "text"), [("WORLD_SIZE", ""), ("MASTER_ADDR", ""), ("MASTER_PORT", "x")])
def test_an_environment_that_lacks_a_part_is_refused(monkeypatch, name, text):
    for other in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(other, "1")
    monkeypatch.setenv(name, text)
    with pytest.raises(
        QSyncError, match=f"but {name} is '{text}'; start the job with torchrun, or unset RANK"
    ):
        JobAddress.of_environment()


def test_an_early_end_is_told_once_a_standstill():
    early_end = EarlyEnd(patience_s=2)
    where = Position(3, BACKWARD, 1, False)
    assert early_end.hear(0, where, {1: 3}) is None
    assert early_end.hear(3, where, {1: 4, 2: None}) is None  # it took that step, or nobody knows
    assert early_end.hear(3, where, {1: 3}) == 1
    assert early_end.hear(9, where, {1: 3}) is None
    moved = Position(3, AFTER_BACKWARD, 4, False)
    assert early_end.hear(10, moved, {1: 3}) is None
    assert early_end.hear(13, moved, {1: 3}) == 1
    assert EarlyEnd(1).hear(0, Position(3, BEFORE_FORWARD, 0, False), {1: 3}) is None


def test_alone_nothing_is_watched():
    with liveness.start(timeout_s=1) as watch:
        assert not [thread for thread in threading.enumerate() if "qsync liveness" in thread.name]
    watch.finish()


@pytest.mark.parametrize("timeout_s", [0, -1, 0.5, float("nan"), float("inf"), True, "x"])
def test_a_timeout_that_is_none_is_refused(timeout_s):
    with pytest.raises(QSyncError, match="timeout_s must be at least 1 second, found"):
        liveness.start(timeout_s)
    with pytest.raises(QSyncError, match="join_timeout_s must be at least 1 second, found"):
        liveness.start(30, join_timeout_s=timeout_s)


def test_pulses_name_the_longest_silent_first():
    pulses = Pulses(now_s=0, patience_s=5)
    pulses.hear(1, {1: "1", 2: "1", 3: "1"})
    pulses.hear(4, {1: "2", 2: "1", 3: "1"})
    pulses.hear(7, {1: "3", 2: "1", 3: "2"})
    assert pulses.silent(8, timeout_s=3) == [2]
    assert pulses.silent(11, timeout_s=3) == [2, 1, 3]
    pulses.forget(2)
    assert pulses.silent(8, timeout_s=3) == []


def test_nobody_is_judged_by_time_in_which_we_stood_still():
    pulses = Pulses(now_s=0, patience_s=5)
    pulses.hear(1, {1: "1"})
    pulses.hear(100, {1: "1"})
    assert pulses.silent(100, timeout_s=30) == []
    assert pulses.silent(131, timeout_s=30) == [1]

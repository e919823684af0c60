"""Agreement between ranks: what is wrong on one rank is said on every rank, and nobody waits for ever."""

from __future__ import annotations

import pytest
from two_ranks import launch

from qsync.distributed.agreement import _around_difference, agree, check_same

START = """
from qsync.distributed.agreement import agree, check_same
from qsync.errors import MismatchError
dist.init_process_group("gloo")
"""


@pytest.mark.dist
def test_every_rank_learns_results_errors_and_differences(tmp_path):
    """One job for all cases: after each failure the ranks must still be in step for the next exchange."""
    output = launch(
        tmp_path,
        START
        + """
say(f"results {agree('adding', lambda: rank + 1)}")

def fails():
    if rank == 1:
        raise ValueError("NaN in layer 3")
try:
    agree("profiling", fails)
except QSyncError as error:
    say(f"{type(error).__name__}: {error}")

def mismatches():
    if rank == 0:
        raise MismatchError("wrong plan")
try:
    agree("loading", mismatches)
except QSyncError as error:
    say(f"{type(error).__name__}: {error}")

try:
    agree("sending", lambda: (lambda: 0) if rank == 1 else 0)
except QSyncError as error:
    say(f"unpicklable: {error}")

check_same({"torch": "2.13.0"})
try:
    check_same({"python": "3.11", "torch": f"2.{13 - rank}.0", "the plan": rank})
except MismatchError as error:
    say(error)
try:
    check_same({"a": 1} if rank == 0 else {"a": 1, "the bucket order": "b"})
except MismatchError as error:
    say(error)
say("still in step")
dist.destroy_process_group()
""",
    )
    for rank in (0, 1):
        mine = f"[{rank}] "
        lines = [line.removeprefix(mine) for line in output.splitlines() if line.startswith(mine)]
        assert lines[0] == "results [1, 2]"
        assert lines[1] == "QSyncError: profiling failed on rank 1: ValueError: NaN in layer 3"
        assert lines[2] == "MismatchError: loading failed on rank 0: wrong plan"
        assert lines[3].startswith("unpicklable: sending failed on rank 1:")
        assert lines[4].startswith("torch differs between ranks: rank 0 has 2.13.0, rank 1 has 2.12.0; ")
        assert lines[5].startswith(
            "the bucket order differs between ranks: rank 0 has nothing, rank 1 has b;"
        )
        assert lines[6] == "still in step"


@pytest.mark.dist
def test_ranks_that_agree_are_counted_not_listed(tmp_path):
    output = launch(
        tmp_path,
        START
        + """
try:
    check_same({"the plan": "b" if rank == 1 else "a"})
except MismatchError as error:
    say(error)
dist.destroy_process_group()
""",
        ranks=3,
    )
    assert output.count("rank 0 (and 1 more) has a, rank 1 has b;") == 3


def test_alone_agree_just_runs():
    assert agree("anything", lambda: 7) == [7]
    check_same({"torch": "2.13.0"})
    with pytest.raises(ZeroDivisionError):
        agree("dividing", lambda: 1 // 0)


def test_long_values_are_cut_to_where_they_differ():
    one, two = ("x" * 500 + stride + "y" * 500 for stride in ("stride (3, 1)", "stride (1, 3)"))
    one, two = _around_difference(one, two)
    assert "(3, 1)" in one and "(1, 3)" in two
    assert len(one) < 120 and one.startswith("...") and one.endswith("...")

"""Measured steps: read from the files of all ranks, split as replay splits, and laid out beside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from graphs import cluster_of, mlp, profile_of

from qsync.errors import FormatError
from qsync.replayer import replay, write_trace
from qsync.replayer.explanation.measured_steps import MeasuredSteps, log_file
from qsync.replayer.explanation.phases import Phases, expected

FAST = Phases(0.01, 0.20, 0.12, 0.02, 0.01, 0.07)
SLOW = Phases(0.01, 0.28, 0.04, 0.02, 0.01, 0.10)


def write(folder, *ranks: dict[int, Phases]) -> MeasuredSteps:
    for rank, steps in enumerate(ranks):
        lines = [
            json.dumps({"step": n, "device_class": ("train", "infer")[rank], "calls": 1, **one.to_json()})
            for n, one in steps.items()
        ]
        log_file(folder, rank).write_text("".join(line + "\n" for line in lines))
    return MeasuredSteps.load(folder)


def test_steps_that_all_ranks_logged_are_split_into_exposed_communication_and_waiting(tmp_path):
    found = write(tmp_path, {1: FAST, 2: FAST, 3: FAST}, {1: SLOW, 2: SLOW})
    assert (found.classes, found.calls, list(found.steps)) == (("train", "infer"), (1, 1), [1, 2])
    fast, slow = found.by_rank()
    assert fast["exposed communication"] == slow["exposed communication"] == 0.04
    assert (fast["wait"], slow["wait"]) == (pytest.approx(0.08), 0.0)
    assert (slow["forward"], slow["backward"]) == (0.10, pytest.approx(0.18))
    assert sum(fast.values()) == pytest.approx(FAST.period_s)


def test_the_window_in_which_a_rank_was_slow_is_named_with_it(tmp_path):
    late = replace(SLOW, compute_s=0.38)
    waits = replace(FAST, blocked_s=0.22)
    slow_steps = {n: late if 100 <= n < 200 else SLOW for n in range(250)}
    fast_steps = {n: waits if 100 <= n < 200 else FAST for n in range(250)}
    found = write(tmp_path, fast_steps, slow_steps)
    ((first, last, drift),) = found.drifts({"train": FAST, "infer": SLOW})
    assert (first, last, drift.rank, drift.phase) == (100, 199, 1, "compute")
    assert (
        write(tmp_path, dict.fromkeys(range(9), FAST), dict.fromkeys(range(9), SLOW)).drifts(
            {"train": FAST, "infer": SLOW}
        )
        == []
    )


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", '{"step": 1}', '{"step": 1, "device_class": "a", "calls": 1, "x": 1}', "[" * 100_000,
        json.dumps({"step": 1, "device_class": "a", "calls": 1, **FAST.to_json(), "host_s": math.nan}),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path, line):
    write(tmp_path, {1: FAST}, {1: SLOW})
    path = log_file(tmp_path, 1)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(FormatError, match=r"rank-1\.jsonl, line 2: not a logged step"):
        MeasuredSteps.load(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    write(tmp_path, {1: FAST}, {1: SLOW})
    log_file(tmp_path, 1).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="is not a text file; give the folder"):
        MeasuredSteps.load(tmp_path)


def test_a_line_that_a_killed_rank_left_half_written_is_passed_over(tmp_path):
    write(tmp_path, {1: FAST, 2: FAST}, {1: SLOW, 2: SLOW})
    path = log_file(tmp_path, 1)
    path.write_text(path.read_text()[:-9])
    assert list(MeasuredSteps.load(tmp_path).steps) == [1]


def test_a_folder_without_common_steps_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no step that every rank logged"):
        MeasuredSteps.load(tmp_path)
    with pytest.raises(FormatError, match="no step that every rank logged"):
        write(tmp_path, {1: FAST}, {2: SLOW})


def test_a_trace_shows_measured_steps_beside_the_predicted_one(tmp_path):
    graph = mlp(3)
    profiles = {name: profile_of(graph, name, slow=s) for name, s in (("train", 1.0), ("infer", 2.0))}
    timeline = replay(graph, {"train": {}, "infer": {}}, profiles, cluster_of())
    measured = write(tmp_path, dict.fromkeys(range(1, 40), FAST), dict.fromkeys(range(1, 40), SLOW))
    events = json.loads(write_trace(timeline, tmp_path / "trace.json", measured).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [
        "train x 1 (simulated)", "infer x 1 (simulated)",
        "rank 0, train (measured)", "rank 1, infer (measured)",
    ]  # fmt: skip
    ends: dict[int, dict[str, float]] = {}
    for pid, steps in ((2, FAST), (3, SLOW)):
        own = sorted((e for e in events if e["pid"] == pid and e["ph"] == "X"), key=lambda e: e["ts"])
        for one, following in pairwise(own):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-3
        assert sum(e["dur"] for e in own) == pytest.approx(20 * steps.period_s * 1e6)
        ends[pid] = {e["name"]: e["ts"] + e["dur"] for e in own if e["name"].startswith("exposed")}
    assert len(ends[2]) == 20 and ends[2] == pytest.approx(ends[3])  # all-reduces end on all ranks at once


def test_what_is_expected_of_forward_is_what_replay_lays_out():
    graph = mlp(3)
    profile = profile_of(graph, "train", loading_s=1e-4)
    found = expected(replay(graph, {"train": {}}, {"train": profile}, cluster_of({"train": 1})))["train"]
    forward_s = sum(profile.ops[op.name][op.dtype].forward_s for op in graph.ops)
    backward_s = sum(profile.ops[op.name][op.dtype].backward_s for op in graph.ops)
    assert found.forward_s == pytest.approx(forward_s)
    assert found.backward_s == pytest.approx(backward_s + profile.outside.total_s)

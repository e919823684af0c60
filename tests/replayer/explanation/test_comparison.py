"""A miss of the prediction is taken apart: its parts make up the whole, and the largest is its cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of

from qsync.records.precision import Precision
from qsync.replayer import replay
from qsync.replayer.explanation.comparison import Comparison, Measured, compare, percentile, predicted_by_kind

GRAPH = mlp(3)
PROFILES = {"train": replace(profile_of(GRAPH, "train"), error=0.02, loading_s=1e-4)}
CLUSTER = cluster_of({"train": 1})
PLAN = {"train": {"fc0": Precision.INT8, "fc1": Precision.BF16}}


def compared(slower: dict[str, float], host_s: float = 0.0, loading_s: float = 0.0) -> Comparison:
    """A run that took what was predicted, but for kinds of nodes that were slower by some seconds."""
    timeline = replay(GRAPH, PLAN, PROFILES, CLUSTER)
    kinds = predicted_by_kind(GRAPH, PROFILES["train"], timeline, "train")
    measured = {kind: seconds + slower.get(kind, 0.0) for kind, seconds in kinds.items()}
    profile = PROFILES["train"]
    host = profile.host_s + profile.outside.total_s + profile.optimizer_s + host_s
    period = timeline.step_s + sum(slower.values()) + host_s + loading_s
    run = Measured(period, host, 0.0, measured, profile.loading_s + loading_s)
    return compare("run", GRAPH, PROFILES, timeline, PLAN, {"train": run})


@pytest.mark.parametrize(
    ("slower", "host_s", "loading_s", "cause"),
    [
        ({"linear int8": 1.0}, 0.0, 0.0, "kernel"),
        ({"cast fp32 to int8_row": 1.0}, 0.0, 0.0, "cast"),
        ({}, 1.0, 0.0, "host"),
        ({}, 0.0, 1.0, "loading"),
        ({"linear int8": -1e-6, "gelu bf16": 1e-7}, 0.0, 0.0, "kernel"),
    ],
)
def test_a_miss_has_the_cause_that_was_put_there(slower, host_s, loading_s, cause):
    found = compared(slower, host_s, loading_s)
    assert found.cause[:2] == ("train", cause)
    misses = found.misses_s["train"]
    assert sum(misses.values()) == pytest.approx(found.measured_s - found.predicted_s, abs=1e-12)
    assert misses["rest"] == pytest.approx(0.0, abs=1e-12)


def test_a_run_as_predicted_has_no_error_and_lies_inside():
    found = compared({})
    assert found.error == pytest.approx(0.0, abs=1e-12) and found.inside
    assert not compared({"linear int8": 1.0}).inside


def test_waiting_is_measured_against_the_class_that_is_blocked_least():
    cluster = cluster_of()
    profiles = {name: profile_of(GRAPH, name) for name in ("train", "infer")}
    plan = {"train": {}, "infer": {}}
    timeline = replay(GRAPH, plan, profiles, cluster)
    runs = {
        name: Measured(timeline.step_s, 0.0, blocked, {})
        for name, blocked in (("train", 5.0), ("infer", 2.0))
    }
    found = compare("run", GRAPH, profiles, timeline, plan, runs)
    assert found.misses_s["train"]["wait"] == pytest.approx(3.0, abs=1e-6)
    assert found.misses_s["infer"]["wait"] == pytest.approx(0.0, abs=1e-6)


def test_a_wait_is_the_cause_only_if_no_other_class_missed_more_than_half_of_it():
    run = compared({})
    misses = {"train": {"wait": 1.0, "kernel": 0.0}, "infer": {"wait": 0.0, "kernel": 0.9}}
    slow = replace(run, measured_s=run.predicted_s + 1.0, misses_s=misses)
    assert slow.cause == ("infer", "kernel", 0.9)
    misses["infer"]["kernel"] = 0.4
    assert slow.cause == ("train", "wait", 1.0)
    fast = replace(slow, measured_s=run.predicted_s / 2, misses_s={"train": {"kernel": 2.0, "cast": -1.0}})
    assert fast.cause == ("train", "cast", -1.0)


def test_the_ends_of_the_interval_lie_inside():
    run = replace(compared({}), interval_s=(1.0, 2.0))
    assert [replace(run, measured_s=s).inside for s in (0.9, 1.0, 2.0, 2.1)] == [False, True, True, False]


def test_percentiles_are_of_the_values():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 101)), 0.95) == 95
    assert percentile([7.0], 0.95) == 7.0
    assert percentile(list(range(1, 2003)), 0.5) == 1001

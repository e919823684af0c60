"""Links as fast as real steps say: the factor that was put in comes out; hidden links are left alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of

from qsync.records.cluster import Cluster, Link
from qsync.records.precision import Precision
from qsync.replayer import replay
from qsync.replayer.link_calibration import with_links_in_use

GRAPH = mlp(4)
PROFILES = {name: profile_of(GRAPH, name) for name in ("train", "infer")}
PLANS = [
    {"train": {}, "infer": {}},
    {"train": {}, "infer": {"fc0": Precision.INT8, "fc1": Precision.BF16}},
]


def runs(cluster, noise=(1.0, 1.0)):
    found = []
    for plan, factor in zip(PLANS, noise, strict=True):
        timeline = replay(GRAPH, plan, PROFILES, cluster)
        name = max(timeline.classes, key=lambda name: timeline[name].compute_s)
        found.append((plan, name, factor * (timeline.step_s - timeline[name].compute_s)))
    return found


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_factor_that_was_put_in_comes_out(factor):
    """An all-reduce as long as the whole step: nothing hides it."""
    step_s = replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s
    measured = replace(cluster_of(), link=Link(step_s, 1e9, 0.7, 2))
    true = replace(measured, link=Link(factor * step_s, 1e9 / factor, 0.7, 2))
    found = with_links_in_use(GRAPH, PROFILES, measured, runs(true, (1.01, 0.99))).link
    assert found.latency_s == pytest.approx(true.link.latency_s, rel=0.06)
    assert found.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.06)
    assert (found.overlap_rate, found.num_ranks) == (0.7, 2)


def test_links_between_hosts_are_scaled_with_those_within():
    step_s = replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s
    link = Link(step_s, 1e9, 1.0, 2)
    measured = replace(cluster_of(), link=link, between=link, num_hosts=2)
    slow = replace(link, latency_s=2 * step_s, bytes_per_s=5e8)
    found = with_links_in_use(GRAPH, PROFILES, measured, runs(replace(measured, link=slow, between=slow)))
    assert found.between is not None
    assert found.between.latency_s / link.latency_s == pytest.approx(2.0, rel=0.06)


def test_a_link_that_no_step_waits_for_stays_as_it_was():
    measured = replace(cluster_of(), link=Link(0.0, 1e15, 1.0, 2))
    found = with_links_in_use(GRAPH, PROFILES, measured, runs(measured, (1.02, 1.02))).link
    assert replace(found, error=0.0) == measured.link


def test_the_error_is_what_steps_still_miss_and_widens_the_interval():
    """The steps of both plans miss the replay that is right for their mean, one above and one below."""
    link = Link(replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s, 1e9, 1.0, 2)
    measured, off = replace(cluster_of(), link=link), 0.08
    found = with_links_in_use(GRAPH, PROFILES, measured, runs(measured, (1 + off, 1 - off)))
    steps = [replay(GRAPH, plan, PROFILES, measured) for plan in PLANS]
    waits = [t.step_s - max(entry.compute_s for entry in t.classes.values()) for t in steps]
    parts = [off * wait_s / t.step_s for wait_s, t in zip(waits, steps, strict=True)]
    assert found.link.error == pytest.approx(1.4826 * sum(parts) / 2, rel=0.1)
    exact = {name: replace(profile, error=0.0, drift=0.0) for name, profile in PROFILES.items()}
    assert replay(GRAPH, PLANS[0], exact, measured).interval_s is None
    low, high = replay(GRAPH, PLANS[0], exact, found).interval_s
    step_s = replay(GRAPH, PLANS[0], exact, found).step_s
    assert low < (1 - found.link.error) * step_s and high > (1 + found.link.error) * step_s


def test_steps_far_from_their_replay_leave_a_cluster_that_can_be_saved():
    """As on a machine that pauses: tiny steps, of which some take several times their replay."""
    link = Link(replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s, 1e9, 1.0, 2)
    measured = replace(cluster_of(), link=link)
    found = with_links_in_use(GRAPH, PROFILES, measured, runs(measured, (0.0, 12.0)))
    assert found.link.error > 1.0
    assert Cluster.from_json(json.loads(json.dumps(found.to_json()))) == found
    low, high = replay(GRAPH, PLANS[0], PROFILES, found).interval_s
    assert low == 0.0 and high > replay(GRAPH, PLANS[0], PROFILES, found).step_s

"""Links and tolls as real steps say: the factors that were put in come out; hidden links are left alone."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of

from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster, Link
from qsync.replayer import replay
from qsync.replayer.exchange_calibration import FACTORS, MeasuredStep, _best, with_exchange_in_use
from qsync.replayer.simulate import simulate_step

GRAPH = mlp(4)
PROFILES = {name: profile_of(GRAPH, name) for name in ("train", "infer")}
PLANS = [
    {"train": {}, "infer": {}},
    {"train": {}, "infer": {"fc0": Precision.INT8, "fc1": Precision.BF16}},
]


def measured_steps(cluster, noise=(1.0, 1.0), profiles=PROFILES, plans=PLANS, graph=GRAPH, cap=None):
    found = []
    for plan, factor in zip(plans, noise, strict=True):
        step = simulate_step(graph, plan, profiles, cluster, cap)
        c = max(range(len(step.works)), key=lambda c: step.works[c].total_s)
        name, end_s = cluster.classes[c].name, step.step.reduced_s
        exposed_s = max(0.0, end_s - step.step.finished_s[c])
        wait_s = factor * (end_s - step.works[c].total_s)
        found.append(MeasuredStep(plan, name, wait_s, factor * exposed_s))
    return found


def in_use(measured, steps):
    return with_exchange_in_use(GRAPH, PROFILES, measured, steps)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_factor_that_was_put_in_comes_out(factor):
    """An all-reduce as long as the whole step: nothing hides it."""
    step_s = replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s
    measured = replace(cluster_of(), link=Link(step_s, 1e9, 0.7, 2))
    true = replace(measured, link=Link(factor * step_s, 1e9 / factor, 0.7, 2))
    found = in_use(measured, measured_steps(true, (1.01, 0.99)))[0].link
    assert found.latency_s == pytest.approx(true.link.latency_s, rel=0.06)
    assert found.bytes_per_s == pytest.approx(true.link.bytes_per_s, rel=0.06)
    assert (found.overlap_rate, found.num_ranks) == (0.7, 2)


def test_links_between_hosts_are_scaled_with_those_within():
    step_s = replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s
    link = Link(step_s, 1e9, 1.0, 2)
    measured = replace(cluster_of(), link=link).on_hosts(2, link)
    slow = replace(link, latency_s=2 * step_s, bytes_per_s=5e8)
    found = in_use(measured, measured_steps(replace(measured, link=slow).on_hosts(2, slow)))[0]
    (latency_s, rate), (before_s, before) = (of.hosts[1].leg("host 0") for of in (found, measured))
    assert latency_s / before_s == pytest.approx(2.0, rel=0.06) == before / rate


def test_a_link_that_no_step_waits_for_stays_as_it_was():
    measured = replace(cluster_of(), link=Link(0.0, 1e15, 1.0, 2))
    found = in_use(measured, measured_steps(measured, (1.02, 1.02)))[0].link
    assert replace(found, error=0.0) == measured.link


def test_the_error_is_what_steps_still_miss_and_widens_the_interval():
    """The steps of both plans miss the replay that is right for their mean, one above and one below."""
    link = Link(replay(GRAPH, PLANS[0], PROFILES, cluster_of()).step_s, 1e9, 1.0, 2)
    measured, off = replace(cluster_of(), link=link), 0.08
    found = in_use(measured, measured_steps(measured, (1 + off, 1 - off)))[0]
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
    found = in_use(measured, measured_steps(measured, (0.0, 12.0)))[0]
    assert found.link.error > 1.0
    assert Cluster.from_json(json.loads(json.dumps(found.to_json()))) == found
    low, high = replay(GRAPH, PLANS[0], PROFILES, found).interval_s
    assert low == 0.0 and high > replay(GRAPH, PLANS[0], PROFILES, found).step_s


WIDE = mlp(4, width=512, rows=512)
CAP = 1024  # bytes of a bucket: a layer each, so that all-reduces run beside backward
LOWERED = {op.name: Precision.BF16 for op in WIDE.adjustable}
# The weak rank's BF16 takes as long as the fast rank's FP32. Elsewhere the fast rank waits for it.
TOGETHER, APART, IN_FP32 = (
    {"train": {}, "infer": LOWERED}, {"train": LOWERED, "infer": LOWERED}, {"train": {}, "infer": {}},
)  # fmt: skip


def tolled(toll_s_per_byte):
    return {
        name: profile_of(WIDE, name, slow=slow, reduce_s_per_call=0.0, reduce_s_per_byte=toll_s_per_byte)
        for name, slow in (("train", 1.0), ("infer", 2.0))
    }


def step_s(plan, profiles, cluster):
    return replay(WIDE, plan, profiles, cluster, bucket_cap_bytes=CAP).step_s


def test_what_all_reduces_take_from_compute_comes_out_and_leaves_the_link_alone():
    """Tolls half as high again as between bare barriers, and half as high once more where the peer waits."""
    alone, in_steps, plans = tolled(2e-9), tolled(3e-9), [TOGETHER, APART, IN_FP32]
    measured = cluster_of(link=Link(0.01, 1e12, 0.5, 2))
    true = replace(measured, link=replace(measured.link, waiting_toll=1.5))
    steps = measured_steps(true, (1.0,) * 3, in_steps, plans, WIDE, CAP)
    cluster, profiles = with_exchange_in_use(WIDE, alone, measured, steps, CAP)
    assert cluster.link.waiting_toll == 1.5
    assert cluster.link.latency_s == pytest.approx(0.01, rel=0.05)
    assert profiles["infer"].reduce_s_per_byte == pytest.approx(3e-9, rel=0.05)
    assert profiles["train"] == alone["train"]  # it never works longest: no step says what it pays
    for plan in plans:
        assert step_s(plan, profiles, cluster) == pytest.approx(step_s(plan, in_steps, true), rel=0.002)


def test_steps_of_other_numbers_of_samples_tell_of_the_same_exchange():
    """More work hides more of an all-reduce: without the profiles of these steps the link seems faster."""
    profiles, larger = (
        {name: profile_of(WIDE, name, slow=times * slow) for name, slow in (("train", 1.0), ("infer", 2.0))}
        for times in (1.0, 2.0)
    )
    measured, true = cluster_of(link=Link(0.025, 1e12, 0.5, 2)), cluster_of(link=Link(0.05, 5e11, 0.5, 2))
    own, more = (
        measured_steps(true, (1.0, 1.0), of, [TOGETHER, IN_FP32], WIDE, CAP) for of in (profiles, larger)
    )
    steps = [*own, *(replace(step, profiles=larger) for step in more)]
    found, without = (
        with_exchange_in_use(WIDE, profiles, measured, of, CAP)[0].link for of in (steps, [*own, *more])
    )
    assert found.latency_s == pytest.approx(0.05) and found.error < 1e-3
    assert without.latency_s < 0.045 and without.error > 0.01


def test_without_measured_steps_links_and_tolls_stay():
    assert with_exchange_in_use(GRAPH, PROFILES, cluster_of(), []) == (cluster_of(), PROFILES)


@pytest.mark.parametrize(
    ("plan", "num_weak", "waits"), [(APART, 1, True), (APART, 2, False), (TOGETHER, 1, False)]
)
def test_a_toll_is_higher_only_where_every_peer_waits(plan, num_weak, waits):
    usual_s, waiting_s = (
        step_s(plan, tolled(2e-9), cluster_of({"train": 1, "infer": num_weak}, link=link))
        for link in (Link(0.01, 1e12, 0.5, 2, 0.0, toll) for toll in (1.0, 2.0))
    )
    assert waiting_s > 1.01 * usual_s if waits else waiting_s == usual_s


def test_what_the_timeline_shows_slowed_is_what_the_step_lost():
    """Operators of backward are laid out at the rates of the step that was simulated."""
    link = Link(0.01, 1e12, 0.5, 2, 0.0, 2.0)
    timeline = replay(WIDE, APART, tolled(2e-9), cluster_of(link=link), bucket_cap_bytes=CAP)
    own_s = sum(e.duration_s for e in timeline.events if (e.device_class, e.phase) == ("infer", "backward"))
    found = simulate_step(WIDE, APART, tolled(2e-9), cluster_of(link=link), CAP)
    assert own_s == pytest.approx(found.works[1].backward_s + found.step.slowed_s[1], rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_few_factors_tried_find_what_all_of_them_would(seed):
    """Misses that rise with the factor between two of them, and are flat outside, whatever their sign."""
    draw = random.Random(seed)
    for _ in range(50):
        at_one, rise, low = (
            draw.uniform(-0.05, 0.05),
            draw.choice([0.0, 0.001, 0.01, 0.1]),
            draw.uniform(0.2, 4),
        )
        high = low * draw.uniform(1, 5)

        def miss(factor, at_one=at_one, rise=rise, low=low, high=high):
            return at_one + rise * (min(max(factor, low), high) - 1)

        def key(factor, miss=miss):
            return round(abs(miss(factor)), 6), round(abs(math.log(factor)), 9)

        assert key(_best(miss)) == key(min(FACTORS, key=key))

"""Replay of a device whose kernels the host launches: beside a host and a device simulated one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from graphs import CPU_PRECISIONS, assignments_for, cluster_of, encoder, profile_of, sensitivity_of
from hypothesis import given
from hypothesis import strategies as st

from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers.fastest_start import fastest_start
from qsync.distributed.monitoring.first_steps import corrected
from qsync.lowering.incremental import Lowering
from qsync.operators.precision import Precision
from qsync.records.cluster import Link
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Cost, Profile
from qsync.replayer import profiles_under_levers, replay
from qsync.replayer.costs.class_costs import ClassCosts
from qsync.replayer.explanation.phases import expected
from qsync.replayer.levers.batch_size import times
from qsync.replayer.slowdown import slowed
from qsync.replayer.synchronous_step import GradientExchange

GRAPH = encoder(2)
KERNELS = replace(profile_of(GRAPH, "gpu"), loading_s=3e-6, bucket_s_per_byte=1e-12)
CLUSTER = cluster_of({"gpu": 2}, link=Link(1e-6, 1e10, 1.0))


def launched(seed: int, slow: float) -> Profile:
    """A profile with launches that take random times, about `slow` times what the kernels do."""
    chance = random.Random(seed)

    def drawn(cost: Cost) -> Cost:
        return Cost(2 * slow * chance.random() * cost.forward_s, 2 * slow * chance.random() * cost.backward_s)

    launches = replace(
        KERNELS,
        ops={op: {mode: drawn(cost) for mode, cost in modes.items()} for op, modes in KERNELS.ops.items()},
        casts={key: drawn(cost) for key, cost in KERNELS.casts.items()},
        outside=times(KERNELS.outside, slow),
        host_s=7e-6,
        optimizer_s=slow * KERNELS.optimizer_s,
        loading_s=0.0,
        bucket_s_per_byte=0.0,
    )
    return replace(KERNELS, launches=launches)


def one_by_one(costs, launches, exchange):
    """Launch every kernel and run it, in a loop: when forward, each operator's backward, and all are done."""
    profile, hosts = costs.profile, launches.profile
    host_s, device_s = profile.loading_s, 0.0

    def run(launch_s, kernel_s):
        nonlocal host_s, device_s
        host_s += launch_s
        device_s = max(host_s, device_s) + kernel_s
        return device_s

    run(hosts.host_s, profile.host_s)
    for launch_s, kernel_s in zip(launches.forward_s, costs.forward_s, strict=True):
        run(launch_s, kernel_s)
    lead_s = run(hosts.outside.total_s, profile.outside.total_s)
    done_s = [0.0] * len(costs.backward_s)
    for i in reversed(range(len(done_s))):
        copied_s = exchange.copied_bytes[i] * profile.bucket_s_per_byte
        done_s[i] = run(launches.backward_s[i], costs.backward_s[i] + copied_s) - lead_s
    backward_s = run(0.0, exchange.unused_bytes * profile.bucket_s_per_byte) - lead_s
    end_s = run(hosts.optimizer_s, profile.optimizer_s)
    ready_s = [(*done_s, backward_s)[bucket.ready] for bucket in exchange.buckets]
    return lead_s, ready_s, backward_s, end_s - lead_s - backward_s


@given(st.integers(0, 9), st.sampled_from([0.0, 0.3, 1.0, 3.0]), assignments_for(GRAPH, CPU_PRECISIONS))
def test_a_step_is_done_when_its_kernels_are_launched_and_run(seed, slow, assignment):
    profile, exchange = launched(seed, slow), GradientExchange(GRAPH, CLUSTER)
    costs = ClassCosts(Lowering(GRAPH, assignment, "bf16"), profile)
    work = exchange.work(costs)
    found = (work.lead_s, work.ready_s, work.backward_s, work.optimizer_s)
    for one, other in zip(found, one_by_one(costs, costs.launches, exchange), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_prices_of_launches_follow_a_change_of_one_operator():
    profile, lowering = launched(1, 1.0), Lowering(GRAPH, {}, "bf16")
    costs = ClassCosts(lowering, profile)
    op = GRAPH.adjustable[0].name
    costs.update(lowering.assign(op, Precision.INT8).touched)
    anew = ClassCosts(Lowering(GRAPH, {op: Precision.INT8}, "bf16"), profile).launches
    np.testing.assert_array_equal(costs.launches.forward_s, anew.forward_s)
    np.testing.assert_array_equal(costs.launches.backward_s, anew.backward_s)


@pytest.mark.parametrize("slow, bound_by", [(0.01, "kernels"), (100.0, "launches")])
def test_the_slower_of_host_and_device_bounds_a_step(slow, bound_by):
    profile = launched(2, slow)
    cluster = cluster_of({"gpu": 1})
    step_s = replay(GRAPH, {"gpu": {}}, {"gpu": profile}, cluster).step_s
    slower = profile.launches if bound_by == "launches" else replace(profile, launches=None, loading_s=0.0)
    alone_s = replay(GRAPH, {"gpu": {}}, {"gpu": slower}, cluster).step_s
    assert alone_s < step_s < 1.1 * alone_s


def test_events_show_what_the_device_waits_for_launches():
    profile = launched(3, 2.0)
    timeline = replay(GRAPH, {"gpu": {}}, {"gpu": profile}, CLUSTER)
    waits = [event for event in timeline.events if event.name.startswith("kernels not launched yet")]
    assert {event.kind for event in waits} == {"host"} and all(event.duration_s > 0.0 for event in waits)
    assert any(event.name.endswith(", backward") for event in waits)
    own = [event for event in timeline.events if event.kind not in ("communication", "wait")]
    # Nothing computes beside the all-reduces at less than full speed here, so that the parts add up.
    assert sum(event.duration_s for event in own) == pytest.approx(timeline.classes["gpu"].compute_s)


def test_waits_for_launches_are_compute_as_a_rank_measures_it():
    profile = launched(3, 2.0)
    timeline = replay(GRAPH, {"gpu": {}}, {"gpu": profile}, CLUSTER)
    work = GradientExchange(GRAPH, CLUSTER).work(ClassCosts(Lowering(GRAPH, {}, "bf16"), profile))
    found, own = expected(timeline)["gpu"], timeline.classes["gpu"]
    before_s = sum(event.duration_s for event in timeline.events if event.name == "host")
    assert found.host_s == pytest.approx(before_s) and before_s >= profile.host_s
    within_s = work.lead_s + work.backward_s - before_s - profile.loading_s + own.slowed_s
    assert found.compute_s == pytest.approx(within_s)


def test_a_device_that_computes_longer_launches_longer_too():
    """Its first steps tell of both together: the corrected step is that of the slower device."""
    profile, cluster = launched(3, 3.0), cluster_of({"gpu": 1})
    timeline = replay(GRAPH, {"gpu": {}}, {"gpu": profile}, cluster)
    predicted = expected(timeline)
    measured = {name: replace(one, compute_s=1.5 * one.compute_s) for name, one in predicted.items()}
    found = corrected(Basis(GRAPH, cluster, {"gpu": profile}, None), predicted, measured)
    added_s = replay(GRAPH, {"gpu": {}}, found.profiles, cluster).step_s - timeline.step_s
    assert added_s == pytest.approx(0.5 * predicted["gpu"].compute_s, rel=0.05)


def test_a_file_keeps_launches(tmp_path):
    profile = launched(4, 1.0)
    assert Profile.load(profile.save(tmp_path / "profile.json")) == profile
    assert "launches" not in KERNELS.to_json()


def test_all_of_a_slower_device_is_slower():
    profile = launched(5, 1.0)
    step_s, twice_s = (
        replay(GRAPH, {"gpu": {}}, {"gpu": p}, cluster_of({"gpu": 1})).step_s
        for p in (profile, slowed(profile, 2.0))
    )
    assert twice_s == pytest.approx(2 * step_s, rel=1e-9)


def test_a_recomputed_block_is_launched_again():
    train, gpu = {"train": profile_of(GRAPH, "train")}, {"gpu": launched(6, 1.0)}
    cluster, levers = (
        cluster_of({"train": 1, "gpu": 1}),
        Levers({"gpu": ClassLevers(recomputed=("layer.0",))}),
    )
    under = profiles_under_levers(GRAPH, train | gpu, cluster, levers)["gpu"].launches
    once, again = gpu["gpu"].launches.ops["layer.0.fc1"]["bf16"], under.ops["layer.0.fc1"]["bf16"]
    assert again.backward_s == once.backward_s + once.forward_s


def test_the_fastest_start_counts_launches():
    each = Cost(5e-5, 5e-5)
    launches = replace(
        KERNELS,
        ops={op: dict.fromkeys(modes, each) for op, modes in KERNELS.ops.items()},
        cast_fit=dict.fromkeys(KERNELS.cast_fit, (each, Cost(0.0))),
        loading_s=0.0, bucket_s_per_byte=0.0,
    )  # fmt: skip
    profiles = {"gpu": replace(KERNELS, launches=launches)}
    state = State(make_problem(GRAPH, profiles, sensitivity_of(GRAPH), CLUSTER))
    one, highest_s = state.classes["gpu"], state.step_s()
    assert one.seconds_at(one.lowering.assignment()) == pytest.approx(one.own_s)
    fastest_start(state, "gpu")
    assert state.step_s() <= highest_s * (1 + 1e-9)

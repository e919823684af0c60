"""Steps that vary: the same seed, the same steps; more noise or ranks, more waiting. And links of hosts."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of, sensitivity_of

from qsync.allocator import allocate
from qsync.errors import FormatError
from qsync.records.cluster import Cluster, Link
from qsync.replayer import cluster_all_reduce_s, replay, vary
from qsync.replayer.communication import order_hint
from qsync.replayer.step_noise import percentile

GRAPH = mlp(4)
PLAN = {"train": {}, "infer": {}}
CAP = {"bucket_cap_bytes": 2**30}


def profiles(noise: float):
    return {name: replace(profile_of(GRAPH, name), noise=noise) for name in PLAN}


def read(cluster: Cluster):
    """What a file of this cluster holds."""
    return json.loads(json.dumps(cluster.to_json()))


def test_the_same_seed_gives_the_same_thousand_steps():
    one, again = (vary(GRAPH, PLAN, profiles(0.05), cluster_of(), seed=3) for _ in range(2))
    assert one == again and len(one.steps_s) == 1000
    assert one.steps_s != vary(GRAPH, PLAN, profiles(0.05), cluster_of(), seed=4).steps_s


def test_without_noise_every_step_is_the_steady_one():
    varied = vary(GRAPH, PLAN, profiles(0.0), cluster_of(), num_steps=5)
    steady = replay(GRAPH, PLAN, profiles(0.0), cluster_of()).step_s
    assert varied.steps_s == pytest.approx([steady] * 5) and varied.lost == pytest.approx(0.0)


def test_a_plan_varies_with_its_own_buckets():
    graph = mlp(4, width=256)
    measured = {name: profile_of(graph, name) for name in PLAN}
    plan = allocate(graph, measured, sensitivity_of(graph), cluster_of(), bucket_cap_bytes=2**16)
    steady = [replay(graph, plan, measured, cluster_of(), **cap).step_s for cap in ({}, CAP)]
    varied = [vary(graph, plan, measured, cluster_of(), num_steps=1, **cap).steady_s for cap in ({}, CAP)]
    assert varied == steady and steady[0] != steady[1]


def test_noise_costs_waiting_and_more_so_with_more_ranks():
    few = vary(GRAPH, PLAN, profiles(0.05), cluster_of({"train": 1, "infer": 1}))
    many = vary(GRAPH, PLAN, profiles(0.05), cluster_of({"train": 500, "infer": 500}))
    assert 0.0 < few.lost < many.lost
    assert few.range_s[0] < statistics.median(few.steps_s) < few.range_s[1]


def test_no_steps_are_refused():
    with pytest.raises(FormatError, match="must be 1 to 1000000, found 0"):
        vary(GRAPH, PLAN, profiles(0.0), cluster_of(), num_steps=0)


def test_a_link_is_carried_over_to_other_numbers_of_ranks_as_a_ring():
    link = Link(1e-4, 1e9, num_ranks=2)

    def all_reduce_s(link, num_bytes, num_ranks):
        return cluster_all_reduce_s(cluster_of({"train": num_ranks}, link=link), num_bytes)

    assert all_reduce_s(link, 10**9, 2) == pytest.approx(1.0001)
    assert all_reduce_s(link, 10**9, 4) == pytest.approx(3e-4 + 1.5)
    assert all_reduce_s(link, 10**9, 1) == 0.0
    assert all_reduce_s(replace(link, num_ranks=None), 10**9, 4) == pytest.approx(1.0001)


def test_the_slowest_leg_of_a_ring_bounds_an_all_reduce():
    flat = cluster_of({"train": 4, "infer": 4}, link=Link(1e-5, 1e10, num_ranks=2))
    between, num_bytes = Link(1e-4, 1e9, num_ranks=2), 10**8
    two = flat.on_hosts(2, between)
    assert [host.ranks for host in two.hosts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    slow_s = 14 * (5e-5 + num_bytes / 8 / 1e9)  # hops of an eighth of the bytes
    assert cluster_all_reduce_s(two, num_bytes) == pytest.approx(slow_s)
    assert slow_s == pytest.approx(cluster_all_reduce_s(replace(flat, link=between), num_bytes))
    slow_there = replace(two.hosts[0], bytes_per_s={"host 0": 1e8, "*": 1e9})
    there_s = cluster_all_reduce_s(replace(two, hosts=(slow_there, two.hosts[1])), num_bytes)
    assert there_s == pytest.approx(14 * (5e-6 + num_bytes / 8 / 1e8))  # within the first host
    turns = [replace(host, ranks=tuple(range(i, 8, 2))) for i, host in enumerate(two.hosts)]
    apart = replace(two, hosts=tuple(turns))
    shared_s = 14 * (5e-5 + num_bytes / 2 / 1e9)  # four messages over the same leg
    assert cluster_all_reduce_s(apart, num_bytes) == pytest.approx(shared_s)
    assert order_hint(two) == "" and "0, 2, 4, 6, 1, 3, 5, 7" in order_hint(apart)
    step = replay(GRAPH, PLAN, profiles(0.0), two).step_s
    assert step > replay(GRAPH, PLAN, profiles(0.0), flat).step_s
    assert Cluster.from_json(read(two)) == two


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hosts": 2}, "need each other; give both or neither"),
        ({"num_hosts": 0}, "cluster, num_hosts: expected `int` >= 1, found 0"),
        ({"between": {"latency_s": 1e-4, "bytes_per_s": 1e9}}, "need each other"),
        ({"num_hosts": 9, "between": {"latency_s": 1e-4, "bytes_per_s": 1e9}}, "9 hosts for 2 ranks"),
        (
            {"num_hosts": 2, "between": {"latency_s": -1, "bytes_per_s": 1e9}},
            "cluster, between, latency_s: expected `int` >= 0, found -1",
        ),
        ({"link": {"latency_s": 0, "bytes_per_s": 1e9, "num_ranks": 1}}, "num_ranks: expected `int` >= 2"),
    ],
)
def test_hosts_that_cannot_be_are_refused(change, match):
    with pytest.raises(FormatError, match=match):
        Cluster.from_json({**read(cluster_of()), **change})


def test_percentiles_are_of_the_values():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 101)), 0.95) == 95
    assert percentile([7.0], 0.95) == 7.0
    assert percentile(list(range(1, 2003)), 0.5) == 1001

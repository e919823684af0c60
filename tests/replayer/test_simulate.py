"""Replay: what a step takes, who waits for whom, and what it may never depend on."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from counting import num_calls
from graphs import (
    CPU_PRECISIONS,
    Builder,
    assignments_for,
    cluster_of,
    encoder,
    graphs,
    mlp,
    profile_of,
    sensitivity_of,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.allocator import allocate, check_plan
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.lowered_graph import Cast
from qsync.operators.precision import Precision
from qsync.operators.registry import REPLACED
from qsync.records.cluster import Cluster, Link
from qsync.records.compression import CodecCost, message_bytes, part_elements
from qsync.records.graph import Input
from qsync.records.plans import ClassPlan, Plan
from qsync.records.profiles import Cost
from qsync.records.variant import Variant
from qsync.replayer import (
    ClassCosts,
    GradientExchange,
    Timeline,
    Work,
    buckets,
    cluster_all_reduce_s,
    peaks,
    replay,
    steady_step,
    write_trace,
)

GRAPH = encoder(2)
FAST, SLOW = profile_of(GRAPH, "train"), profile_of(GRAPH, "infer", slow=2.0)
PROFILES = {"train": FAST, "infer": SLOW}
NOTHING = {"train": {}, "infer": {}}
FREE = Link(0.0, 1e30)

links = st.builds(
    Link,
    st.sampled_from([0.0, 1e-6, 1e-4]),
    st.sampled_from([1e8, 1e9, 1e12]),
    st.sampled_from([1.0, 0.5]),
)


def own_work(profile):
    """The work of a rank that lowers nothing: it runs torch's own dropout."""
    modes = {op.name: str(Variant(op.dtype, as_traced=op.kind in REPLACED)) for op in GRAPH.ops}
    ops = sum((profile.ops[name][mode] for name, mode in modes.items()), start=_Sum())
    return profile.host_s + profile.outside.total_s + profile.optimizer_s + ops.total_s


class _Sum:
    total_s = 0.0

    def __add__(self, cost: Cost) -> _Sum:
        added = _Sum()
        added.total_s = self.total_s + cost.total_s
        return added


def test_one_rank_in_fp32_takes_the_sum_of_its_times_and_communicates_nothing():
    profile = replace(FAST, bucket_s_per_byte=1.0)
    timeline = replay(GRAPH, {"train": {}}, {"train": profile}, cluster_of({"train": 1}))
    assert timeline.step_s == pytest.approx(own_work(FAST))
    assert timeline["train"].wait_s == timeline["train"].exposed_s == timeline["train"].slowed_s == 0.0
    assert not [event for event in timeline.events if event.kind == "communication"]


def test_the_fast_class_waits_for_the_slow_one():
    timeline = replay(GRAPH, NOTHING, PROFILES, cluster_of(link=FREE))
    assert timeline.step_s == pytest.approx(own_work(SLOW))
    assert timeline["train"].wait_s == pytest.approx(own_work(SLOW) - own_work(FAST))
    assert timeline["infer"].wait_s == 0.0
    assert timeline["train"].wait_fraction == pytest.approx(0.5, abs=1e-3)


def test_filling_buckets_adds_to_backward():
    copying = {name: replace(p, bucket_s_per_byte=1e-9) for name, p in PROFILES.items()}
    more = 4e-9 * sum(p.num_elements for p in GRAPH.parameters)
    timeline, without = (replay(GRAPH, NOTHING, ps, cluster_of(link=FREE)) for ps in (copying, PROFILES))
    assert timeline["infer"].compute_s == pytest.approx(own_work(SLOW) + more)
    assert any("to buckets" in event.name for event in timeline.events)
    assert not any("to buckets" in event.name for event in without.events)


def test_counts_change_neither_events_nor_step():
    few = replay(GRAPH, NOTHING, PROFILES, cluster_of({"train": 1, "infer": 1}))
    many = replay(GRAPH, NOTHING, PROFILES, cluster_of({"train": 512, "infer": 4096}))
    assert (few.step_s, few.events) == (many.step_s, many.events)


@given(links, st.sampled_from([None, 1000, 50_000]), st.data())
def test_the_parts_of_every_class_sum_to_the_step(link, cap, data):
    assignments = {name: data.draw(assignments_for(GRAPH, CPU_PRECISIONS)) for name in PROFILES}
    timeline = replay(GRAPH, assignments, PROFILES, cluster_of(link=link), bucket_cap_bytes=cap)
    for entry in timeline.classes.values():
        parts = entry.compute_s + entry.slowed_s + entry.exposed_s + entry.wait_s
        assert parts == pytest.approx(timeline.step_s)
        assert min(entry.slowed_s, entry.exposed_s, entry.wait_s) >= 0.0
    assert min(entry.wait_s for entry in timeline.classes.values()) == 0.0


@given(links, st.sampled_from([1.5, 10.0]), st.sampled_from([None, 50_000]))
def test_more_bandwidth_is_never_slower(link, factor, cap):
    def step(link):
        return replay(GRAPH, NOTHING, PROFILES, cluster_of(link=link), bucket_cap_bytes=cap).step_s

    assert step(replace(link, bytes_per_s=link.bytes_per_s * factor)) <= step(link) * (1 + 1e-12)


@given(links, st.floats(1.0, 4.0))
def test_a_slower_class_never_makes_a_faster_step(link, slow):
    def step(slow):
        profiles = {"train": FAST, "infer": profile_of(GRAPH, "infer", slow=slow)}
        return replay(GRAPH, NOTHING, profiles, cluster_of(link=link)).step_s

    assert step(slow) <= step(slow * 1.3) * (1 + 1e-12)


def test_communication_hides_behind_backward_but_for_the_last_bucket():
    link = Link(0.0, 1e12)
    cap = 1000
    free = {"train": replace(FAST, reduce_s_per_call=0.0, reduce_s_per_byte=0.0)}
    timeline = replay(GRAPH, {"train": {}}, free, cluster_of({"train": 2}, link=link), bucket_cap_bytes=cap)
    last = buckets(GRAPH, cap)[-1]
    assert last.ready == 0
    assert timeline["train"].exposed_s == pytest.approx(link.latency_s + last.num_bytes / link.bytes_per_s)
    assert timeline.step_s == pytest.approx(
        own_work(FAST) + link.latency_s + last.num_bytes / link.bytes_per_s
    )


# Timelines small enough to write down. One class has 1 s before backward, 4 s of backward, buckets after 1
# and 4 s.
ONE = Work(lead_s=1.0, ready_s=(1.0, 4.0), backward_s=4.0, optimizer_s=0.0)


def test_buckets_go_one_after_the_other():
    step = steady_step([ONE], [5.0, 1.0], Link(0.0, 1.0))
    assert step.flights == ((2.0, 7.0), (7.0, 8.0))


def test_an_all_reduce_starts_when_the_last_class_arrives():
    late = Work(3.0, (1.0, 4.0), 4.0, 0.0)
    step = steady_step([ONE, late], [0.5, 0.5], Link(0.0, 1.0))
    assert step.flights == ((4.0, 4.5), (7.0, 7.5))
    assert step.finished_s == (5.0, 7.0)


def test_communication_takes_time_from_compute_while_it_lasts():
    # In flight from 2 s for 2 s at half speed: 1 s of work is done meanwhile, 2 s are left at 4 s.
    step = steady_step([replace(ONE, tolls_s=(1.0, 0.0))], [2.0, 0.0], Link(0.0, 1.0))
    assert step.flights[0] == (2.0, 4.0)
    assert step.finished_s == (6.0,)


def test_an_all_reduce_is_slower_while_anyone_computes_and_has_full_speed_after():
    # 3 s of backward are left when the first starts; at half speed it does 1.5 s of its 2.5 s, the last
    # second is free.
    step = steady_step([ONE], [2.5, 1.0], Link(0.0, 1.0, overlap_rate=0.5))
    assert step.flights == ((2.0, 6.0), (6.0, 7.0))


@pytest.mark.parametrize(
    ("tolls_s", "durations_s", "overlap_rate", "reduced_s"),
    [
        ((), (0.5, 3.0), 1.0, 8.0),  # 5 s of compute, then the last all-reduce
        ((1.5, 0.0), (2.0, 1.0), 1.0, 7.5),
        ((2.0, 0.0), (2.0, 1.0), 1.0, 7.8),  # a tenth of the core is left to compute: 1.8 s are lost
        ((2.0, 0.0), (2.0, 1.0), 0.5, 8.0),
    ],
)
def test_a_class_alone_loses_the_toll_of_an_all_reduce_beside_its_compute(
    tolls_s, durations_s, overlap_rate, reduced_s
):
    work, link = replace(ONE, tolls_s=tolls_s), Link(0.0, 1.0, overlap_rate)
    assert steady_step([work], durations_s, link).reduced_s == pytest.approx(reduced_s)


def test_a_class_with_a_fast_optimizer_gets_ahead_of_the_others():
    # The last all-reduce sets both free; the second class has 2 s of optimizer, the first makes use of them.
    first, second = Work(4.0, (4.0,), 4.0, 0.0), Work(2.0, (4.0,), 4.0, 2.0)
    assert steady_step([first, second], [1.0], Link(0.0, 1.0)).reduced_s == 9.0


def test_backward_after_the_last_bucket_delays_the_next_step():
    work = Work(1.0, (1.0,), 4.0, 0.0)  # 3 s of backward after the only bucket
    step = steady_step([work], [1.0], Link(0.0, 1.0))
    assert step.reduced_s == pytest.approx(5.0)
    assert step.starts_s == (2.0,)


@given(graphs(), st.data())
def test_the_sequence_priced_is_the_lowered_graph_and_every_node_has_its_event(graph, data):
    assume(graph.adjustable)
    assignment = data.draw(assignments_for(graph))
    cluster = cluster_of({"infer": 2}, precisions=tuple(Precision))
    profile = profile_of(graph, precisions=tuple(Precision))
    timeline = replay(graph, {"infer": assignment}, {"infer": profile}, cluster)
    nodes = lower(graph, assignment).nodes
    assert timeline.sequence("infer") == nodes
    forward = [
        e for e in timeline.events if e.kind in ("forward", "cast") and not e.name.endswith("backward")
    ]
    assert [event.kind == "cast" for event in forward] == [isinstance(node, Cast) for node in nodes]
    starts = [event.start_s for event in forward]
    assert starts == sorted(starts)


@given(links, st.sampled_from([None, 3000]), st.data())
def test_events_of_a_class_fill_its_step_without_overlap(link, cap, data):
    assignments = {name: data.draw(assignments_for(GRAPH, CPU_PRECISIONS)) for name in PROFILES}
    profiles = {
        name: replace(profile, bucket_s_per_byte=1e-9, loading_s=1e-5) for name, profile in PROFILES.items()
    }
    timeline = replay(GRAPH, assignments, profiles, cluster_of(link=link), bucket_cap_bytes=cap)
    for name, entry in timeline.classes.items():
        own = [e for e in timeline.events if e.device_class == name]
        compute = sorted(
            (e for e in own if e.kind != "communication"), key=lambda e: (e.start_s, e.duration_s)
        )
        tiny = 1e-9 * timeline.step_s
        for first, second in pairwise(compute):
            assert first.start_s + first.duration_s <= second.start_s + tiny
        busy = sum(event.duration_s for event in compute)
        assert busy + entry.exposed_s == pytest.approx(timeline.step_s)


def test_a_plan_is_replayed_as_its_assignments():
    assignment = {op.name: Precision.BF16 for op in GRAPH.adjustable}
    plan = Plan(GRAPH.model, GRAPH.hash, {"train": ClassPlan(dict.fromkeys(assignment, Precision.FP32)),
                                          "infer": ClassPlan(assignment)})  # fmt: skip
    assert replay(GRAPH, plan, PROFILES, cluster_of()) == replay(
        GRAPH, {"train": {}, "infer": assignment}, PROFILES, cluster_of()
    )


def test_what_does_not_belong_together_is_refused():
    cluster = cluster_of()
    with pytest.raises(MismatchError, match="no profile of device class 'infer'"):
        replay(GRAPH, NOTHING, {"train": FAST}, cluster)
    with pytest.raises(MismatchError, match="no assignment for device class 'infer'"):
        replay(GRAPH, {"train": {}}, PROFILES, cluster)
    with pytest.raises(MismatchError, match="belongs to another model"):
        replay(mlp(), NOTHING, PROFILES, cluster)
    with pytest.raises(
        UnsupportedError, match="head is to run in fp16 on infer, which has only fp32, bf16, int8"
    ):
        replay(GRAPH, {"train": {}, "infer": {"head": Precision.FP16}}, PROFILES, cluster)


def test_a_timeline_reads_back_as_it_was_written(tmp_path):
    timeline = replay(GRAPH, {"train": {}, "infer": {"head": Precision.INT8}}, PROFILES, cluster_of())
    assert Timeline.load(timeline.save(tmp_path / "timeline.json")) == timeline
    assert json.loads((tmp_path / "timeline.json").read_text())["simulated"] is True
    with pytest.raises(FormatError, match="events, entry 1: object missing required field `device_class`"):
        Timeline.from_json({**timeline.to_json(), "events": [{"name": "x"}]})
    with pytest.raises(MismatchError, match="no device class 'other'"):
        timeline["other"]


def test_a_trace_has_one_process_per_class_and_times_in_microseconds(tmp_path):
    timeline = replay(GRAPH, NOTHING, PROFILES, cluster_of({"train": 2, "infer": 3}))
    events = json.loads(write_trace(timeline, tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["train x 2 (simulated)", "infer x 3 (simulated)"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    for entry, event in zip(complete, timeline.events, strict=True):
        assert entry["ts"] == pytest.approx(event.start_s * 1e6)
        assert entry["dur"] == pytest.approx(event.duration_s * 1e6)
        assert entry["tid"] == (1 if event.kind == "communication" else 0)
        assert names[entry["pid"]].startswith(event.device_class)


def test_a_step_s_time_costs_a_few_calls_per_bucket_not_per_operator():
    graph = encoder(30)
    assert len(graph.ops) > 500
    from qsync.replayer import step_time

    cluster: Cluster = cluster_of(link=Link(1e-5, 1e9))
    exchange = GradientExchange(graph, cluster, 100_000)
    assert len(exchange.buckets) > 10
    costs = [ClassCosts(Lowering(graph, {}), profile_of(graph, name)) for name in ("train", "infer")]
    works = [exchange.work(entry) for entry in costs]
    assert num_calls(lambda: step_time(works, exchange)) < 20 * len(exchange.buckets)


def test_buffers_that_ddp_hands_out_make_all_ranks_start_together():
    graph = mlp(3)
    buffered = replace(graph, inputs=(*graph.inputs, Input("norm.running_mean", "buffer", "fp32", (64,))))
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 2.0))}
    profiles = {
        name: replace(p, shapes_hash=buffered.shapes_hash, graph_hash=buffered.hash)
        for name, p in profiles.items()
    }
    profiles["infer"] = replace(profiles["infer"], optimizer_s=5e-3)
    plan, cluster = {"train": {}, "infer": {}}, cluster_of(link=Link(1e-3, 1e9))
    without, timeline = (replay(g, plan, profiles, cluster) for g in (graph, buffered))
    assert timeline.step_s >= without.step_s + 1e-3
    handed_out = {e.device_class: e.duration_s for e in timeline.events if e.name == "buffers handed out"}
    late = profiles["infer"].optimizer_s - profiles["train"].optimizer_s
    assert handed_out["infer"] == pytest.approx(1e-3, rel=1e-3)
    assert handed_out["train"] == pytest.approx(1e-3 + late, rel=1e-3)
    assert min(event.start_s for event in timeline.events) == pytest.approx(0.0, abs=1e-12)
    reduced = max(e.start_s + e.duration_s for e in timeline.events if e.kind == "communication")
    optimizers = {e.device_class: e.start_s for e in timeline.events if e.name == "optimizer"}
    assert set(optimizers) == {"train", "infer"}
    assert all(start == pytest.approx(reduced, rel=1e-6) for start in optimizers.values())
    for entry in timeline.classes.values():
        parts = entry.compute_s + entry.slowed_s + entry.exposed_s + entry.wait_s
        assert parts == pytest.approx(timeline.step_s)


def test_waiting_for_the_next_batch_comes_first_in_a_step():
    slow = {name: replace(profile, loading_s=3e-3) for name, profile in PROFILES.items()}
    one, timeline = (replay(GRAPH, NOTHING, profiles, cluster_of()) for profiles in (PROFILES, slow))
    assert timeline.step_s == pytest.approx(one.step_s + 3e-3)
    assert {entry.loading_s for entry in timeline.classes.values()} == {3e-3}
    for name, entry in timeline.classes.items():
        assert entry.compute_s == pytest.approx(one[name].compute_s + 3e-3)
        own = [event for event in timeline.events if event.device_class == name]
        assert (own[0].name, own[0].kind, own[0].duration_s) == ("data loading", "loading", 3e-3)
    assert not any(event.kind == "loading" for event in one.events)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_only_the_class_that_waits_for_batches_is_late():
    slow = {**PROFILES, "train": replace(PROFILES["train"], loading_s=1.0)}
    timeline = replay(GRAPH, NOTHING, slow, cluster_of())
    assert timeline["infer"].wait_s > 0.9 and timeline["train"].wait_s == 0.0


def test_buffers_are_handed_out_before_every_call_unless_the_job_does_not():
    build = Builder("norm")
    x = build.enter("x", (8, 4))
    build.enter("n.running_mean", (1 << 20,), "buffer")
    build.loss("loss", build.linear("fc", x, 4))
    graph = build.build()
    profiles = {name: profile_of(graph, name) for name in ("train", "infer")}
    cluster = cluster_of(link=Link(1e-4, 1e8))

    def step_s(calls, cluster):
        nothing = {"train": {}, "infer": {}}
        return replay(replace(graph, num_calls=calls), nothing, profiles, cluster).step_s

    once, thrice = step_s(1, cluster), step_s(3, cluster)
    without = replace(cluster, broadcasts_buffers=False)
    assert (
        thrice - once == pytest.approx(2 * GradientExchange(graph, cluster).broadcast_s)
        and thrice > 1.5 * once
    )
    assert step_s(1, without) == pytest.approx(once - GradientExchange(graph, cluster).broadcast_s)
    assert Cluster.from_json(without.to_json()) == without != cluster == Cluster.from_json(cluster.to_json())


def test_a_plan_is_replayed_with_its_own_buckets():
    graph = encoder(2)
    profiles = {name: profile_of(graph, name) for name in ("train", "infer")}
    cluster, cap = cluster_of(link=Link(1e-5, 1e8)), 4096
    plan = allocate(graph, profiles, sensitivity_of(graph), cluster, bucket_cap_bytes=cap)
    own, given = (replay(graph, plan, profiles, cluster, bucket_cap_bytes=c).step_s for c in (None, cap))
    assert own == given != replay(graph, plan, profiles, cluster, bucket_cap_bytes=1 << 30).step_s
    assert check_plan(graph, plan, profiles, sensitivity_of(graph), cluster).ok


def test_precisions_may_be_given_by_name():
    graph, cluster = encoder(2), cluster_of({"infer": 1})
    profiles = {"infer": profile_of(graph)}
    chosen = {op.name: Precision.BF16 for op in graph.adjustable}
    by_name = {op: str(precision) for op, precision in chosen.items()}
    found, expected = (
        (
            replay(graph, {"infer": of}, profiles, cluster).step_s,
            peaks(graph, {"infer": of}, profiles, cluster)["infer"].peak_bytes,
        )
        for of in (by_name, chosen)
    )
    assert found == expected


def test_a_class_is_one_rank_by_its_own_count_whoever_its_profile_is_of():
    graph, cluster = mlp(2), cluster_of({"one": 1, "three": 3})
    costs = ClassCosts(Lowering(graph, {}), profile_of(graph, "one"))
    works = [GradientExchange(graph, cluster).work(costs, name) for name in ("one", "three")]
    assert [work.is_one for work in works] == [True, False]


def test_a_compressed_exchange_is_priced_by_its_bytes_and_its_codec():
    graph = mlp(width=64)
    plain = cluster_of()
    exact = GradientExchange(graph, plain)
    codecs = {"int8": CodecCost(1e-4, 2e-9)}
    cluster = replace(plain, compression={"*": "int8"}, codecs=codecs)
    exchange = GradientExchange(graph, cluster)
    size = sum(value.num_elements for value in graph.parameters)
    row = message_bytes(part_elements(size, plain.num_ranks))
    assert exchange.sent_bytes == 2 * (plain.num_ranks - 1) * row < 0.3 * exact.sent_bytes
    sent_s = 2 * cluster_all_reduce_s(plain, row * plain.num_ranks / 2)
    assert exchange.durations_s == pytest.approx((sent_s + 1e-4 + 2e-9 * 4 * size,))
    profiles = {name: profile_of(graph, name) for name in NOTHING}
    tolled = {
        name: replace(
            profile,
            reduce_s_per_call=0.0,
            reduce_s_per_byte=1e-9,
            exchange_tolls={"int8": CodecCost(3e-3, 0.0)},
        )
        for name, profile in profiles.items()
    }
    assert replay(graph, NOTHING, tolled, cluster).sent_bytes == exchange.sent_bytes
    assert exchange.tolls_s(tolled["train"]) == (3e-3,)
    assert exact.tolls_s(tolled["train"]) == pytest.approx((4e-9 * size,))


def test_layers_pay_for_both_hosts_chains_and_the_leaders_exchange():
    graph, size = mlp(width=64), 4 * sum(value.num_elements for value in mlp(width=64).parameters)
    plain = cluster_of({"train": 3, "infer": 3}, link=Link(2e-5, 1e9, num_ranks=2))
    hosts = plain.on_hosts(2, Link(2e-3, 1e7, num_ranks=2))
    codecs = {"fp32": CodecCost(1e-2, 0.0), "bf16": CodecCost(1e-4, 0.0)}
    flat = GradientExchange(graph, replace(hosts, codecs=codecs))
    assert flat.durations_s == pytest.approx((10 * (1e-3 + size / 6 / 1e7),))  # DDP's own, without a codec
    assert flat.sent_bytes == pytest.approx(2 * 5 / 6 * size)
    chains_s = 2 * (2 * 1e-5 + size / 1e9)  # to the leader, and back
    for kind, part, codec_s in (("fp32", 1.0, 1e-2), ("bf16", 0.5, 1e-4)):
        exchange = GradientExchange(graph, replace(hosts, codecs=codecs, compression={"*": kind}))
        assert exchange.durations_s == pytest.approx((chains_s + 2e-3 + part * size / 1e7 + codec_s,))
        assert exchange.sent_bytes == pytest.approx(part * size)
        profile = replace(profile_of(graph), exchange_tolls={kind: CodecCost(5e-3, 0.0)})
        assert exchange.tolls_s(profile) == (5e-3,)
    alone = replace(plain.on_hosts(6, Link(2e-3, 1e7, num_ranks=2)), compression={"*": "bf16"})
    assert GradientExchange(graph, alone).sent_bytes == pytest.approx(2 * 5 / 6 * size / 2)

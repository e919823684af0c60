"""The critical path: its events add up to the step, and they alone can shorten it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from graphs import CPU_PRECISIONS, assignments_for, cluster_of, encoder, mlp, profile_of
from hypothesis import given
from hypothesis import strategies as st

from qsync.operators.declaration import Role
from qsync.records.cluster import Link
from qsync.records.graph import Input, Op
from qsync.records.profiles import Cost
from qsync.replayer import Work, find_critical_path, replay, steady_step
from qsync.replayer.explanation.critical_path import ALL_CLASSES
from qsync.replayer.levers.batch_size import times

GRAPH = encoder(2)
NOTHING = {"train": {}, "infer": {}}
links = st.builds(
    Link,
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([1e7, 1e8, 1e9, 1e12]),
    st.sampled_from([1.0, 0.5]),
)
caps = st.sampled_from([None, 3000, 50_000])


def profiles_of(graph, slow=2.0, **changes):
    changed = {"bucket_s_per_byte": 1e-10, "loading_s": 1e-5, **changes}
    return {name: profile_of(graph, name, slow=s, **changed) for name, s in (("train", 1.0), ("infer", slow))}


def assert_adds_up(path, step_s):
    assert path.step_s == step_s
    assert sum(event.duration_s for event in path.events) == pytest.approx(step_s, rel=1e-9)
    assert all(0.0 <= event.slowed_s <= event.duration_s * (1 + 1e-9) for event in path.events)


@given(links, caps, st.floats(0.5, 3.0), st.data())
def test_the_path_adds_up_to_the_step_and_has_no_gap(link, cap, slow, data):
    assignments = {name: data.draw(assignments_for(GRAPH, CPU_PRECISIONS)) for name in NOTHING}
    profiles, cluster = profiles_of(GRAPH, slow), cluster_of(link=link)
    path = find_critical_path(GRAPH, assignments, profiles, cluster, bucket_cap_bytes=cap)
    timeline = replay(GRAPH, assignments, profiles, cluster, bucket_cap_bytes=cap)
    assert_adds_up(path, timeline.step_s)
    for first, second in pairwise(path.events):
        assert first.start_s + first.duration_s == pytest.approx(second.start_s, abs=1e-9 * path.step_s)
    on_timeline = {(e.device_class, e.name): e for e in timeline.events}
    for event in path.events:
        if event.device_class != ALL_CLASSES:
            same = on_timeline[event.device_class, event.name]
            assert (same.start_s, same.duration_s) == (event.start_s, event.duration_s)


@given(links, caps, st.integers(0, 9), st.sampled_from([0.3, 1.0, 3.0]), st.data())
def test_the_path_adds_up_where_kernels_are_launched(link, cap, seed, slow, data):
    chance = random.Random(seed)
    profiles = {}
    for name, profile in profiles_of(GRAPH).items():
        costs = {
            op: {mode: times(cost, 2 * slow * chance.random()) for mode, cost in modes.items()}
            for op, modes in profile.ops.items()
        }
        launches = replace(profile, ops=costs, loading_s=0.0, bucket_s_per_byte=0.0)
        profiles[name] = replace(profile, launches=launches)
    assignments = {name: data.draw(assignments_for(GRAPH, CPU_PRECISIONS)) for name in NOTHING}
    cluster = cluster_of(link=link)
    path = find_critical_path(GRAPH, assignments, profiles, cluster, bucket_cap_bytes=cap)
    assert_adds_up(path, path.step_s)
    assert path.step_s == replay(GRAPH, assignments, profiles, cluster, bucket_cap_bytes=cap).step_s


# Nothing runs at another speed beside something else: the path alone can shorten the step.
alone = st.builds(Link, st.sampled_from([0.0, 1e-5, 1e-4]), st.sampled_from([1e8, 1e9, 1e12]))


@given(
    alone,
    caps,
    st.floats(0.9, 1.1),
    st.sampled_from([op.name for op in GRAPH.ops if op.flops]),
    st.booleans(),
)
def test_events_of_the_path_shorten_the_step_and_no_others_do(link, cap, slow, op, forward):
    profiles = profiles_of(GRAPH, slow, reduce_s_per_call=0.0, reduce_s_per_byte=0.0)
    cluster = cluster_of(link=link)
    path = find_critical_path(GRAPH, NOTHING, profiles, cluster, bucket_cap_bytes=cap)
    name = f"{op} [fp32]" if forward else f"{op} [fp32], backward"
    for device_class, profile in profiles.items():
        before = profile.ops[op]["fp32"]
        less = 1e-3 * (before.forward_s if forward else before.backward_s)
        after = Cost(before.forward_s - less * forward, before.backward_s - less * (not forward))
        ops = {**profile.ops, op: {"fp32": after, "bf16": after}}
        changed = {**profiles, device_class: replace(profile, ops=ops)}
        shorter = find_critical_path(GRAPH, NOTHING, changed, cluster, bucket_cap_bytes=cap)
        won = path.step_s - shorter.step_s
        if (device_class, name) not in {(e.device_class, e.name) for e in path.events}:
            assert won == pytest.approx(0.0, abs=1e-9 * path.step_s)
        elif [(e.device_class, e.name) for e in shorter.events] == [
            (e.device_class, e.name) for e in path.events
        ]:
            assert won == pytest.approx(less, rel=1e-6, abs=1e-12)
        else:  # another chain took over on the way
            assert -1e-12 <= won <= less + 1e-12


def test_a_faster_link_shortens_the_step_only_if_an_all_reduce_is_on_the_path():
    profiles = profiles_of(GRAPH)
    for bytes_per_s in (1e7, 1e30):
        cluster = cluster_of(link=Link(0.0, bytes_per_s))
        path = find_critical_path(GRAPH, NOTHING, profiles, cluster)
        exposed = sum(event.duration_s for event in path.events if event.device_class == ALL_CLASSES)
        faster = replay(GRAPH, NOTHING, profiles, cluster_of(link=Link(0.0, 2 * bytes_per_s)))
        assert path.step_s - faster.step_s == pytest.approx(exposed / 2, abs=1e-12)


def test_a_class_that_waits_is_not_on_the_path():
    path = find_critical_path(GRAPH, NOTHING, profiles_of(GRAPH), cluster_of())
    assert path.classes == ("infer",)
    phases = [run[0].phase for run in path.stretches()]
    assert phases == ["loading", "host", "forward", "loss", "backward", "communication", "optimizer"]


def test_time_lost_to_all_reduces_beside_backward_is_told_apart():
    cluster = cluster_of(link=Link(2e-5, 1e12))
    for toll_s in (0.0, 1e-5):
        profiles = profiles_of(GRAPH, reduce_s_per_call=toll_s, reduce_s_per_byte=0.0)
        path = find_critical_path(GRAPH, NOTHING, profiles, cluster, bucket_cap_bytes=50_000)
        timeline = replay(GRAPH, NOTHING, profiles, cluster, bucket_cap_bytes=50_000)
        lost_s = sum(event.slowed_s for event in path.events if event.phase == "backward")
        assert lost_s == pytest.approx(timeline["infer"].slowed_s, abs=1e-12)
        assert (lost_s > 1e-5) == (toll_s > 0.0)


def test_an_all_reduce_tells_how_much_compute_beside_it_slows_it():
    link = Link(0.0, 1e7, overlap_rate=0.5)
    path = find_critical_path(
        GRAPH, NOTHING, profiles_of(GRAPH), cluster_of(link=link), bucket_cap_bytes=50_000
    )
    reduces = [event for event in path.events if event.device_class == ALL_CLASSES]
    assert sum(event.duration_s - event.slowed_s for event in reduces) == pytest.approx(
        sum(4 * p.num_elements for p in GRAPH.parameters) / 1e7
    )
    assert reduces[0].slowed_s > 0.0 and reduces[-1].slowed_s == pytest.approx(0.0, abs=1e-12)


def test_buffers_that_are_handed_out_are_on_the_path_with_the_class_that_is_ready_last():
    buffered = replace(mlp(3), inputs=(*mlp(3).inputs, Input("norm.running_mean", "buffer", "fp32", (64,))))
    profiles = profiles_of(buffered)
    profiles["train"] = replace(profiles["train"], optimizer_s=5e-3)
    cluster = cluster_of(link=Link(1e-3, 1e9))
    path = find_critical_path(buffered, NOTHING, profiles, cluster)
    assert_adds_up(path, replay(buffered, NOTHING, profiles, cluster).step_s)
    assert (path.events[0].name, path.events[0].device_class) == ("buffers handed out", "train")
    assert (path.events[-1].name, path.events[-1].device_class) == ("optimizer", "train")
    assert path.events[1].device_class == "infer"


def with_a_long_end_of_backward(profile_seconds):
    """A graph whose first operator has no parameter: its backward follows the last bucket."""
    graph = mlp(3)
    first = Op("first", "gelu", Role.FOLLOWING, ("x",), (), "fp32", graph.ops[0].shape, requires_grad=True)
    ops = (first, replace(graph.ops[0], inputs=("first", *graph.ops[0].inputs[1:])), *graph.ops[1:])
    graph = replace(graph, ops=ops)
    profiles = profiles_of(graph, 1.0)
    slow = {mode: Cost(0.0, profile_seconds) for mode in profiles["infer"].ops["first"]}
    profiles["infer"] = replace(profiles["infer"], ops={**profiles["infer"].ops, "first": slow})
    return graph, profiles


def test_a_class_that_computes_after_the_last_all_reduce_is_the_whole_path():
    graph, profiles = with_a_long_end_of_backward(1e-2)
    cluster = cluster_of()
    path = find_critical_path(graph, NOTHING, profiles, cluster)
    assert_adds_up(path, replay(graph, NOTHING, profiles, cluster).step_s)
    assert path.classes == ("infer",)
    assert not [event for event in path.events if event.kind == "communication"]


def test_a_class_that_falls_behind_a_little_every_step_binds_in_the_end():
    # The second class needs 6.1 s a step, 0.1 s more than the first lets a step take at first.
    first = Work(4.0, (1.0,), 1.0, 0.0)
    second = Work(1.0, (1.0,), 5.1, 0.0)
    step = steady_step([first, second], [1.0], Link(0.0, 1.0))
    assert step.reduced_s == pytest.approx(6.1)


def test_one_rank_alone_is_its_own_path():
    path = find_critical_path(GRAPH, {"train": {}}, profiles_of(GRAPH), cluster_of({"train": 1}))
    assert_adds_up(path, replay(GRAPH, {"train": {}}, profiles_of(GRAPH), cluster_of({"train": 1})).step_s)
    assert {event.kind for event in path.events} == {
        "loading", "host", "forward", "loss", "backward", "optimizer"
    }  # fmt: skip


def test_copies_of_parameters_that_no_operator_uses_are_on_the_path():
    graph = replace(GRAPH, inputs=(*GRAPH.inputs, Input("unused", "parameter", "fp32", (1000,), True)))
    profiles, cluster = profiles_of(graph, bucket_s_per_byte=1e-8), cluster_of()
    path = find_critical_path(graph, NOTHING, profiles, cluster)
    assert_adds_up(path, replay(graph, NOTHING, profiles, cluster).step_s)
    assert "unused parameters, gradients to buckets" in {event.name for event in path.events}

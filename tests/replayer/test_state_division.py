"""Profiles and cluster of a step whose optimizer state is divided: memory, seconds, who owns what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of
from hypothesis import given
from hypothesis import strategies as st

from qsync.errors import FormatError
from qsync.records.state_division import BUCKET_BYTES, owners
from qsync.replayer import cluster_all_reduce_s, peaks, replay
from qsync.replayer.levers.state_division import _copied_bytes, divided, spare_parts

GRAPH, CLUSTER = mlp(3, width=32, rows=16), cluster_of()
SIZES = {value.name: value.num_bytes for value in GRAPH.parameters}
STATE = {name: 2 * size + 4 for name, size in SIZES.items()}
PROFILES = {
    name: profile_of(
        GRAPH, name, slow=slow, optimizer_bytes=sum(STATE.values()) + 100, state_bytes=STATE,
        optimizer_workspace_bytes=2 * max(SIZES.values()),
    )
    for name, slow in (("train", 1.0), ("infer", 1.4))
}  # fmt: skip
PLAIN = {"train": {}, "infer": {}}


@given(
    st.dictionaries(st.text(min_size=1), st.integers(1, 1000), min_size=1),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    st.randoms(),
)
def test_parts_are_met_to_one_parameter_in_any_order(sizes, parts, random):
    found = owners(sizes, parts)
    turned = list(sizes.items())
    random.shuffle(turned)
    assert owners(dict(turned), parts) == found and found.keys() == sizes.keys()
    for rank, part in enumerate(parts):
        own = [sizes[name] for name, its in found.items() if its == rank]
        assert part or not own
        # Its last and smallest parameter went to it while it lacked some of its part.
        assert sum(own) - min(own, default=0) <= part / sum(parts) * sum(sizes.values())


def test_a_rank_holds_its_own_part_alone():
    profiles, cluster = divided(GRAPH, PROFILES, CLUSTER, {"train": 3, "infer": 1})
    ranks = [c.name for c in CLUSTER.classes for _ in range(c.count)]
    owned = owners(SIZES, [{"train": 3, "infer": 1}[name] for name in ranks])
    whole, part = (replay(GRAPH, PLAIN, *records) for records in ((PROFILES, CLUSTER), (profiles, cluster)))
    for name in ("train", "infer"):
        most = max(
            sum(STATE[p] for p, its in owned.items() if its == rank)
            for rank, its_class in enumerate(ranks)
            if its_class == name
        )
        assert profiles[name].optimizer_bytes == most + 100
        saved = sum(STATE.values()) - most
        assert whole[name].memory_bytes - part[name].memory_bytes == saved
        shown = peaks(GRAPH, PLAIN, profiles, cluster)[name]
        assert shown.parts["optimizer"] == most + 100
        assert profiles[name].optimizer_s < PROFILES[name].optimizer_s


def test_updated_weights_are_broadcast_before_the_next_step():
    profiles, cluster = divided(GRAPH, PROFILES, CLUSTER, {"train": 1, "infer": 1})
    unchanged = {name: replace(one, optimizer_s=PROFILES[name].optimizer_s) for name, one in profiles.items()}
    before, after = (replay(GRAPH, PLAIN, unchanged, each) for each in (CLUSTER, cluster))
    seconds = cluster_all_reduce_s(CLUSTER, sum(SIZES.values()))
    handed_out = [event for event in after.events if event.name == "weights handed out"]
    assert min(event.duration_s for event in handed_out) == pytest.approx(seconds)
    assert (
        before.step_s
        < after.step_s
        <= before.step_s + 1.0001 * seconds + max(one.optimizer_s for one in unchanged.values())
    )


def test_parts_by_spare_memory_leave_room_for_the_state():
    peak = {
        name: entry.memory_bytes for name, entry in replay(GRAPH, PLAIN, PROFILES, CLUSTER).classes.items()
    }
    state = sum(STATE.values())
    tight = CLUSTER.with_memory({"train": peak["train"] + state, "infer": peak["infer"] - state + 1000})
    assert spare_parts(GRAPH, PLAIN, PROFILES, tight) == {"train": 2 * state, "infer": 1000}
    over = CLUSTER.with_memory({"infer": peak["infer"] - state - 1000})
    assert spare_parts(GRAPH, PLAIN, PROFILES, over)["infer"] == 0.0


def test_state_that_was_not_measured_by_parameter_counts_by_size():
    unmeasured = {name: replace(one, state_bytes={}) for name, one in PROFILES.items()}
    profiles, _ = divided(GRAPH, unmeasured, CLUSTER, {"infer": 1})
    rank_of_none, whole = profiles["train"].optimizer_bytes, PROFILES["infer"].optimizer_bytes
    assert rank_of_none == pytest.approx(0, abs=len(SIZES))
    assert profiles["infer"].optimizer_bytes <= whole


@pytest.mark.parametrize(
    "parts", [{}, {"train": 0}, {"train": -1, "infer": 2}, {"train": float("nan")}, {"x": 1}]
)
def test_parts_that_leave_the_state_to_nobody_are_refused(parts):
    with pytest.raises(FormatError):
        divided(GRAPH, PROFILES, CLUSTER, parts)


def test_broadcasts_copy_two_buckets_of_several_parameters():
    cap = BUCKET_BYTES
    assert _copied_bytes([]) == _copied_bytes([5 * cap]) == _copied_bytes([5 * cap, 2 * cap, 7]) == 0
    assert _copied_bytes([1, 5 * cap, 2]) == 3
    assert _copied_bytes([cap - 1] * 3 + [4]) == 2 * (cap - 1) + (cap - 1) + 4

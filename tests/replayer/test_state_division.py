"""Profiles and cluster of a step whose optimizer state is divided: memory, seconds, who owns what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of, sensitivity_of
from hypothesis import given
from hypothesis import strategies as st

import qsync
from qsync.allocator import check_plan, uniform
from qsync.errors import FormatError, InfeasibleError, MismatchError
from qsync.records.levers import ClassLevers, Levers
from qsync.records.state_division import BUCKET_BYTES, owners
from qsync.replayer import cluster_all_reduce_s, peaks, profiles_under_levers, replay
from qsync.replayer.levers.state_division import _copied_bytes, divided, spare_parts

GRAPH = mlp(3, width=32, rows=16)
CLUSTER = replace(
    cluster_of(), classes=tuple(replace(c, count=1 + i) for i, c in enumerate(cluster_of().classes))
)
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
PLAN = uniform(GRAPH, PROFILES, CLUSTER, {})
LEVERS = Levers({"train": ClassLevers(state_part=0.2), "infer": ClassLevers(state_part=0.4)})


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
    parts = {"train": 0.2, "infer": 0.4}
    profiles = profiles_under_levers(GRAPH, PROFILES, CLUSTER, LEVERS)
    ranks = [c.name for c in CLUSTER.classes for _ in range(c.count)]
    owned = owners(SIZES, [parts[name] for name in ranks])
    whole, part = (replay(GRAPH, PLAIN, each, CLUSTER) for each in (PROFILES, profiles))
    for name in parts:
        most = max(
            sum(STATE[p] for p, its in owned.items() if its == rank)
            for rank, its_class in enumerate(ranks)
            if its_class == name
        )
        assert profiles[name].optimizer_bytes == most + 100
        assert whole[name].memory_bytes - part[name].memory_bytes == sum(STATE.values()) - most
        assert peaks(GRAPH, PLAIN, profiles, CLUSTER)[name].parts["optimizer"] == most + 100


def test_every_rank_waits_for_the_slowest_owner_and_the_broadcasts():
    profiles = profiles_under_levers(GRAPH, PROFILES, CLUSTER, LEVERS)
    seconds = cluster_all_reduce_s(CLUSTER, sum(SIZES.values()))
    lasts = {profile.optimizer_s for profile in profiles.values()}
    assert len(lasts) == 1
    names = [c.name for c in CLUSTER.classes for _ in range(c.count)]
    owned = owners(SIZES, [LEVERS[name].state_part for name in names])
    updates = [
        PROFILES[name].optimizer_s * sum(SIZES[p] for p, its in owned.items() if its == rank)
        for rank, name in enumerate(names)
    ]
    assert lasts.pop() == pytest.approx(seconds + max(updates) / sum(SIZES.values()))
    gpu = {name: replace(one, launches=one) for name, one in PROFILES.items()}
    launches = divided(GRAPH, gpu, CLUSTER, {"train": 0.0, "infer": 0.5})["train"].launches
    assert launches.optimizer_s == 0.0
    alone = replace(CLUSTER, classes=(replace(CLUSTER.classes[0], count=1),))
    (one,) = divided(GRAPH, PROFILES, alone, {"train": 1.0}).values()
    assert one.optimizer_s == PROFILES["train"].optimizer_s
    assert one.optimizer_bytes == PROFILES["train"].optimizer_bytes


def test_parts_by_spare_memory_leave_room_for_the_state():
    peak = {name: PLAN[name].predicted.memory_bytes for name in PLAIN}
    state, num = sum(STATE.values()), {c.name: c.count for c in CLUSTER.classes}
    tight = CLUSTER.with_memory({"train": peak["train"] + state, "infer": peak["infer"] - state + 1000})
    total = num["train"] * 2 * state + num["infer"] * 1000
    wanted = {"train": 2 * state / total, "infer": 1000 / total}
    assert spare_parts(GRAPH, PLAN, PROFILES, tight) == pytest.approx(wanted)
    over = CLUSTER.with_memory({"infer": peak["infer"] - state - 1000})
    assert spare_parts(GRAPH, PLAN, PROFILES, over)["infer"] == 0.0
    none = over.with_memory({"train": 1})
    assert set(spare_parts(GRAPH, PLAN, PROFILES, none).values()) == {1 / CLUSTER.num_ranks}


def test_state_that_was_not_measured_by_parameter_counts_by_size():
    unmeasured = {name: replace(one, state_bytes={}) for name, one in PROFILES.items()}
    profiles = divided(GRAPH, unmeasured, CLUSTER, {"train": 0.0, "infer": 1.0})
    assert profiles["train"].optimizer_bytes == pytest.approx(0, abs=len(SIZES))
    assert 0 < profiles["infer"].optimizer_bytes <= PROFILES["infer"].optimizer_bytes


def test_parts_compose_with_other_levers():
    both = {name: replace(entry, recomputed=("fc1",)) for name, entry in LEVERS.classes.items()}
    profiles = profiles_under_levers(GRAPH, PROFILES, CLUSTER, Levers(both))
    alone = profiles_under_levers(GRAPH, PROFILES, CLUSTER, LEVERS)
    assert profiles["train"].optimizer_bytes == alone["train"].optimizer_bytes
    assert profiles["train"].setting.levers.recomputed == ("fc1",)
    assert profiles["train"].setting.levers.state_part == 0.2


def test_a_state_of_no_rank_is_refused():
    nobody = Levers({"train": ClassLevers(state_part=0.0)})
    with pytest.raises(FormatError, match="leave the optimizer's state to no rank"):
        profiles_under_levers(GRAPH, PROFILES, CLUSTER, nobody)
    with pytest.raises(FormatError, match="state_part"):
        Levers.from_json({"classes": {"train": {"state_part": -1.0}}})


def test_a_plan_fits_where_undivided_state_does_not(tmp_path):
    """The strong class takes what the weak one has no room for, and says so in the plan."""
    peak, state = {name: PLAN[name].predicted.memory_bytes for name in PLAIN}, sum(STATE.values())
    budgets = {"train": peak["train"], "infer": peak["infer"] - state // 2}
    options = {"budgets": budgets, "pins": {"*": "fp32"}}
    records = (GRAPH, PROFILES, sensitivity_of(GRAPH), CLUSTER)
    with pytest.raises(InfeasibleError):
        qsync.plan(*records, **options)
    plan = qsync.plan(*records, divide_state=True, **options)
    parts = plan.levers.state_parts
    assert parts == pytest.approx({"train": 1 / 2, "infer": 1 / 4})
    assert plan["infer"].predicted.state_bytes < plan["train"].predicted.state_bytes < state
    profiles = profiles_under_levers(GRAPH, PROFILES, CLUSTER, plan.levers)
    found = check_plan(GRAPH, plan, profiles, sensitivity_of(GRAPH), CLUSTER)
    assert found.ok, found.violations
    assert replay(GRAPH, plan, profiles, CLUSTER).step_s == plan.step_s
    with pytest.raises(MismatchError, match="of the optimizer's state"):
        replay(GRAPH, plan, PROFILES, CLUSTER)
    plan.save(tmp_path / "plan.json")
    assert qsync.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(FormatError, match="divide_state must be True or False, found 1"):
        qsync.plan(*records, divide_state=1)


def test_broadcasts_copy_two_buckets_of_several_parameters():
    cap = BUCKET_BYTES
    assert _copied_bytes([]) == _copied_bytes([5 * cap]) == _copied_bytes([5 * cap, 2 * cap, 7]) == 0
    assert _copied_bytes([1, 5 * cap, 2]) == 3
    assert _copied_bytes([cap - 1] * 3 + [4]) == 2 * (cap - 1) + (cap - 1) + 4

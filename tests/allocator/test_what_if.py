"""What-ifs: each is what full replay of the changed input says, and the best comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

from qsync.allocator import what_ifs
from qsync.operators.precision import Precision
from qsync.records.cluster import Link
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plans import ClassPlan, Plan
from qsync.records.profiles import Cost
from qsync.replayer import Recapture, profiles_under_levers, replay, slowed

GRAPH = encoder(2)
PROFILES = {
    "train": profile_of(GRAPH, "train"),
    "infer": profile_of(GRAPH, "infer", slow=2.0, loading_s=1e-4),
}
SENSITIVITY = sensitivity_of(GRAPH)
SLOW_LINK = Link(1e-5, 1e8)


def plan_of(**assignments: dict[str, Precision]) -> Plan:
    base = {op.name: Precision.FP32 for op in GRAPH.adjustable}
    classes = {name: ClassPlan({**base, **assignments.get(name, {})}) for name in PROFILES}
    return Plan(GRAPH.model, GRAPH.hash, classes)


FP32 = plan_of()


def found_of(plan=FP32, profiles=PROFILES, cluster=None, cap=None):
    cluster = cluster or cluster_of(link=SLOW_LINK)
    return what_ifs(GRAPH, replace(plan, bucket_cap_bytes=cap), profiles, SENSITIVITY, cluster)


def step_of(plan=FP32, profiles=PROFILES, cluster=None, cap=None):
    return replay(GRAPH, plan, profiles, cluster or cluster_of(link=SLOW_LINK), bucket_cap_bytes=cap).step_s


def one_of(found, what, device_class=None):
    (one,) = [w for w in found if w.what == what and w.device_class in (device_class, w.device_class)]
    return one


def test_the_changes_are_ranked_by_the_seconds_they_win():
    found = found_of()
    assert [one.won_s for one in found] == sorted((one.won_s for one in found), reverse=True)
    assert all(one.won_s > 0.0 for one in found)
    assert all(one.step_s == pytest.approx(step_of() - one.won_s) for one in found if one.kind != "card")


def test_links_are_replayed():
    found = found_of(cap=50_000)
    faster = cluster_of(link=replace(SLOW_LINK, bytes_per_s=2e8))
    assert one_of(found, "the link has twice the bandwidth").step_s == step_of(cluster=faster, cap=50_000)
    faster = cluster_of(link=replace(SLOW_LINK, latency_s=5e-6))
    assert one_of(found, "the link has half the latency").step_s == step_of(cluster=faster, cap=50_000)


@pytest.mark.parametrize(
    ("link", "cap", "better"), [(Link(1e-3, 1e12), 50_000, 100_000), (Link(0.0, 1e8), 100_000, 50_000)]
)
def test_buckets_of_another_size_are_replayed(link, cap, better):
    found = found_of(cluster=cluster_of(link=link), cap=cap)
    (best,) = [one for one in found if one.kind == "buckets"]
    assert best.step_s == step_of(cluster=cluster_of(link=link), cap=better)
    assert best.what == f"buckets of {better / 2**20:.3g} MiB (bucket_cap_mb)"


def test_two_kinds_of_links_are_told_apart():
    cluster = cluster_of({"train": 2, "infer": 2}, link=Link(0.0, 1e12)).on_hosts(2, SLOW_LINK)
    first = next(one for one in found_of(cluster=cluster) if one.kind == "link")
    assert first.what == "the link between hosts has twice the bandwidth"
    twice = replace(SLOW_LINK, bytes_per_s=2 * SLOW_LINK.bytes_per_s)
    assert first.step_s == step_of(cluster=cluster.on_hosts(2, twice))


def test_one_more_card_counts_by_the_samples_it_takes():
    cluster = cluster_of({"train": 1, "infer": 3}, link=replace(SLOW_LINK, num_ranks=4))
    card = one_of(found_of(cluster=cluster), "one more card of infer")
    more = step_of(cluster=cluster_of({"train": 1, "infer": 4}, link=replace(SLOW_LINK, num_ranks=4)))
    assert card.step_s == more > step_of(cluster=cluster)
    assert card.won_s == pytest.approx(step_of(cluster=cluster) - more * 4 / 5)


def test_a_kind_of_kernel_twice_as_fast_is_a_profile_with_half_its_times():
    plan = plan_of(infer={"layer.0.fc1": Precision.INT8, "layer.1.fc1": Precision.INT8})
    ops = {
        op: {
            mode: cost._replace(forward_s=cost.forward_s / 2, backward_s=cost.backward_s / 2)
            if op.endswith("fc1") else cost for mode, cost in modes.items()
        }
        for op, modes in PROFILES["infer"].ops.items()
    }  # fmt: skip
    switch = PROFILES["infer"].switch_s["int8"]
    switches = {"int8": Cost(switch.forward_s / 2, switch.backward_s / 2)}
    faster = {**PROFILES, "infer": replace(PROFILES["infer"], ops=ops, switch_s=switches)}
    # The gelu after each is computed in its epilogue, in no time of its own.
    found = one_of(found_of(plan), "kernels of linear int8 twice as fast", "infer")
    assert found.step_s == pytest.approx(step_of(plan, faster))


@pytest.mark.parametrize(
    ("kind", "field"), [("loading", "loading_s"), ("host", "host_s"), ("optimizer", "optimizer_s")]
)
def test_parts_beside_the_graph_are_replayed(kind, field):
    half = replace(PROFILES["infer"], **{field: getattr(PROFILES["infer"], field) / 2})
    (found,) = [one for one in found_of() if one.kind == kind and one.device_class == "infer"]
    assert found.step_s == pytest.approx(step_of(profiles={**PROFILES, "infer": half}))


def test_precisions_are_tried_on_the_class_that_all_wait_for_alone():
    found = [one for one in found_of(cluster=cluster_of()) if one.kind == "precision"]
    assert found and {one.device_class for one in found} == {"infer"}
    one = one_of(found, "layer.0.fc1 in bf16")
    lowered = plan_of(infer={"layer.0.fc1": Precision.BF16})
    assert one.step_s == pytest.approx(step_of(lowered, cluster=cluster_of()))
    assert one.variance > 0.0


def test_raising_an_operator_that_was_lowered_in_vain_is_found():
    """Its cast costs more than the product saves."""
    dear = {**PROFILES, "infer": profile_of(GRAPH, "infer", slow=2.0, latency_s=1e-2)}
    plan = plan_of(infer={"head": Precision.BF16})
    best = found_of(plan, dear, cluster_of())[0]
    assert (best.kind, best.what) == ("precision", "head in fp32")
    assert best.variance < 0.0


def test_a_change_that_exceeds_memory_says_so():
    """All in INT8 just fits; raising one operator saves more for backward."""
    plan = plan_of(infer={op.name: Precision.INT8 for op in GRAPH.adjustable if op.kind == "linear"})
    dear = {**PROFILES, "infer": profile_of(GRAPH, "infer", slow=2.0, latency_s=1e-3)}
    timeline = replay(GRAPH, plan, dear, cluster_of())
    plan = replace(plan, budgets={"infer": timeline["infer"].memory_bytes})
    found = what_ifs(GRAPH, plan, dear, SENSITIVITY, cluster_of())
    assert [one for one in found if one.kind == "precision" and one.beyond_bytes > 0]


def test_a_card_takes_as_many_samples_as_its_class():
    graph, smaller = mlp(3, rows=16), mlp(3, rows=8)
    levers = Levers({"train": ClassLevers(24), "infer": ClassLevers(8)})
    profiles = {"train": profile_of(graph, "train"), "infer": profile_of(graph, "infer", slow=2.0)}
    profiles = profiles_under_levers(graph, profiles, cluster_of(), levers, Recapture(smaller, {}))
    base = {op.name: Precision.FP32 for op in graph.adjustable}
    plan = Plan(graph.model, graph.hash, {name: ClassPlan(base) for name in profiles}, levers=levers)
    found = what_ifs(graph, plan, profiles, sensitivity_of(graph), cluster_of())
    step_s = replay(graph, plan, profiles, cluster_of()).step_s
    for name, part in (("train", 32 / 56), ("infer", 32 / 40)):
        card = one_of(found, f"one more card of {name}")
        assert card.won_s == pytest.approx(step_s - card.step_s * part)


def test_pinned_operators_are_left_alone():
    plan = replace(FP32, pins={"layer.0.*": Precision.FP32})
    tried = [one.what for one in found_of(plan) if one.kind == "precision"]
    assert tried and not [what for what in tried if "layer.0" in what]


def test_launches_of_a_step_that_waits_for_them_are_replayed():
    infer = PROFILES["infer"]
    bound = PROFILES | {"infer": replace(infer, launches=slowed(replace(infer, loading_s=0.0), 3.0))}
    faster = bound | {"infer": replace(infer, launches=slowed(replace(infer, loading_s=0.0), 1.5))}
    one = one_of(found_of(profiles=bound), "launches of kernels twice as fast", "infer")
    assert one.step_s == pytest.approx(step_of(profiles=faster), rel=1e-9)
    assert not any("launches" in one.what for one in found_of())

"""Prices by the table: times and memory of every node of the lowered graph, and few questions."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from counting import num_calls
from graphs import CPU_PRECISIONS, assignments_for, cluster_of, encoder, graphs, images, mlp, profile_of
from hypothesis import assume, given
from hypothesis import strategies as st
from reference_lowering import reference_lowering

from qsync.errors import MismatchError
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.memory.peak import peak_memory
from qsync.records.cluster import Link
from qsync.records.graph import OpGraph
from qsync.records.plans import ClassPlan, Plan
from qsync.records.profiles import Cost, Profile
from qsync.replayer import ClassCosts, GradientExchange, replay, step_time
from qsync.replayer.costs import class_costs
from qsync.replayer.costs.class_costs import node_cost
from qsync.replayer.lazy_sequence import OnAccess


def drawn(graph: OpGraph, seed: int, among=tuple(Precision)) -> dict[str, Precision]:
    rng = random.Random(seed)
    return {
        op.name: rng.choice([p for p in PRECISIONS_BY_KIND[op.kind] if p in among]) for op in graph.adjustable
    }


def with_measured_casts(graph: OpGraph, profile: Profile, seed: int = 0) -> Profile:
    """Some casts measured by name, in either order, and some operators in one order only."""
    rng = random.Random(seed)
    names = [entry.name for entry in (*graph.inputs, *graph.ops)]
    pairs = [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "int8_row"), ("fp32", "int8_image")]
    orders = ("", " channels_last")
    casts = {
        (name, source + rng.choice(orders), target): Cost(rng.random(), rng.random())
        for name in names
        for source, target in pairs
        if rng.random() < 0.5
    }
    casts[("nothing of this graph", "fp32", "bf16")] = Cost(1.0)
    ops = {
        op: {
            mode + rng.choice(orders): Cost(c.forward_s * rng.random(), c.backward_s)
            for mode, c in of.items()
        }
        for op, of in profile.ops.items()
    }
    return replace(profile, casts=casts, ops=ops)


def check(graph: OpGraph, assignment, profile: Profile, cluster, cap=None) -> None:
    """Replay says of one class what the nodes of its lowered graph say: prices, step, memory."""
    name = cluster.classes[0].name
    timeline = replay(graph, {name: assignment}, {name: profile}, cluster, bucket_cap_bytes=cap)
    lowered = reference_lowering(graph, assignment, cluster[name].carried_16bit)
    costs = ClassCosts(Lowering(graph, assignment, cluster[name].carried_16bit), profile)
    expected, ops = np.zeros((2, len(graph.ops))), {op.name: op for op in graph.ops}
    position, done = {op.name: i for i, op in enumerate(graph.ops)}, 0
    for node in lowered.nodes:  # a result's cast stands at its operator, a graph input's before the next
        done += isinstance(node, Run)
        at = position.get(node.value, done) if isinstance(node, Cast) else done - 1
        expected[:, at] += node_cost(profile, node, ops)[:2]
    np.testing.assert_allclose((costs.forward_s, costs.backward_s), expected, rtol=1e-12)
    exchange = GradientExchange(graph, cluster, cap)
    assert timeline.step_s == step_time([exchange.work(costs)], exchange)
    assert timeline.sequence(name) == lowered.nodes
    memory = peak_memory(lowered, optimizer_bytes=profile.optimizer_bytes, num_ranks=cluster.num_ranks)
    assert timeline[name].memory_bytes == memory.peak_bytes


@given(graphs(), st.sampled_from([1, 2]), st.data())
def test_random_graphs_are_priced_node_by_node(graph, num_ranks, data):
    assume(graph.adjustable)
    profile = profile_of(graph, precisions=tuple(Precision), optimizer_bytes=12345)
    cluster = cluster_of({"infer": num_ranks}, precisions=tuple(Precision))
    for measured in (profile, with_measured_casts(graph, profile)):
        check(graph, data.draw(assignments_for(graph)), measured, cluster, cap=100)


@pytest.mark.parametrize("graph", [mlp(3), encoder(3), images(3)], ids=["mlp", "encoder", "images"])
def test_blocks_are_priced_node_by_node(graph):
    profile = profile_of(graph, precisions=CPU_PRECISIONS)
    cluster = cluster_of({"infer": 3})
    for seed in range(6):
        check(graph, drawn(graph, seed, CPU_PRECISIONS), profile, cluster)
        check(graph, drawn(graph, seed, CPU_PRECISIONS), with_measured_casts(graph, profile, seed), cluster)


@pytest.mark.parametrize("family", ["llama", "vit", "resnet"])
def test_captured_models_are_replayed_node_by_node(family):
    pytest.importorskip("transformers")
    from models import graph_of

    graph = graph_of(family)
    profile = profile_of(graph, precisions=tuple(Precision), optimizer_bytes=777)
    cluster = cluster_of({"infer": 2}, precisions=tuple(Precision))
    for seed in range(6):
        check(graph, drawn(graph, seed), with_measured_casts(graph, profile, seed), cluster, cap=10_000)


def test_equal_layers_may_have_been_measured_differently():
    """In another order, not in every type, and casts of images in both orders."""
    graph = images(3)
    profile = profile_of(graph, precisions=CPU_PRECISIONS)
    ops = {op: dict(reversed(of.items())) if op.startswith("1.") else of for op, of in profile.ops.items()}
    ops["2.relu"] = {"fp32": ops["2.relu"]["fp32"]}
    casts = {
        (op.name, f"fp32{order}", target): Cost(1e-3 * k + len(order), 2e-3 * k)
        for k, op in enumerate(graph.ops)
        for order in ("", " channels_last")
        for target in ("bf16", "int8_image")
    }
    for seed in range(8):
        check(
            graph,
            drawn(graph, seed, (Precision.BF16, Precision.INT8)),
            replace(profile, ops=ops, casts=casts),
            cluster_of({"infer": 1}),
        )


def test_a_plan_that_saves_less_is_replayed_as_it_says():
    graph = encoder(2)
    profile = profile_of(graph)
    ops = {
        op: {
            m: c for mode, c in of.items() for m in (mode, f"{mode} codes", f"{mode} bits", f"{mode} output")
        }
        for op, of in profile.ops.items()
    }
    assignment = dict.fromkeys((op.name for op in graph.adjustable), Precision.INT8)
    plan = Plan(graph.model, graph.hash, {"infer": ClassPlan(assignment)}).save_less("*")
    timeline = replay(graph, plan, {"infer": replace(profile, ops=ops)}, cluster_of({"infer": 1}))
    less = [op.name for op in graph.ops if op.kind in ("gelu", "layer_norm", "dropout")]
    lowered = lower(graph, assignment, "bf16", less)
    assert timeline.sequence("infer") == lowered.nodes
    assert timeline["infer"].memory_bytes == peak_memory(lowered).peak_bytes
    assert {getattr(node, "form", "plain") for node in lowered.nodes} > {"plain"}


def test_what_has_no_price_is_refused_as_the_single_prices_refuse_it():
    graph = encoder(1)
    profile, cluster = profile_of(graph), cluster_of({"infer": 1})
    without = {op: {m: c for m, c in of.items() if m != "int8"} for op, of in profile.ops.items()}
    plan = {"infer": {"head": Precision.INT8}}
    with pytest.raises(MismatchError, match=r"no time of head in int8 .it has fp32, bf16"):
        replay(graph, plan, {"infer": replace(profile, ops=without)}, cluster)
    with pytest.raises(MismatchError, match=r"no cast from fp32 to int8_row .needed for layer.0.norm2"):
        replay(graph, plan, {"infer": replace(profile, cast_fit={})}, cluster)


def test_prices_are_asked_for_once_for_every_distinct_neighbourhood(monkeypatch):
    asked = []
    real = class_costs.nearest_mode
    monkeypatch.setattr(class_costs, "nearest_mode", lambda *args: (asked.append(args[1]), real(*args))[1])
    counts = []
    for num_layers in (2, 4, 8):
        graph = encoder(num_layers)
        profile = profile_of(graph)
        assignment = {op.name: Precision.INT8 for op in graph.adjustable}
        asked.clear()
        ClassCosts(Lowering(graph, assignment), profile)
        counts.append(len(asked))
        asked.clear()
        ClassCosts(Lowering(graph, assignment), profile)
        assert not asked
    assert counts[0] == counts[1] == counts[2] > 0


def test_replay_costs_as_many_calls_for_many_ranks_and_few_more_for_many_layers():
    def calls(num_layers: int, num_ranks: int) -> int:
        graph = encoder(num_layers)
        profiles = {name: profile_of(graph, name) for name in ("train", "infer")}
        cluster = cluster_of(dict.fromkeys(profiles, num_ranks), link=Link(1e-5, 1e9, 1.0, 2))
        plan = {name: drawn(graph, 0, CPU_PRECISIONS) for name in profiles}
        replay(graph, plan, profiles, cluster)
        return num_calls(lambda: replay(graph, plan, profiles, cluster))

    few = calls(4, 10)
    assert calls(4, 10_000) == few
    # Once its table is made, a step is replayed with some three calls per operator: a layer has 18 of them.
    assert calls(40, 10) - few < 4 * 36 * 18 * 2


def test_a_step_is_replayed_without_laying_out_its_events_and_nodes(monkeypatch):
    made = []
    real = Lowering.lowered
    monkeypatch.setattr(Lowering, "lowered", lambda self: (made.append(self), real(self))[1])
    graph = mlp(2)
    timeline = replay(graph, {"infer": {}}, {"infer": profile_of(graph)}, cluster_of({"infer": 1}))
    assert timeline.step_s > 0 and not made
    assert timeline.sequence("infer") == reference_lowering(graph, {}).nodes and len(made) == 1
    assert timeline.events and timeline.events[0].kind == "host" and len(made) == 2
    assert timeline.events[-1].kind == "optimizer" and len(made) == 2  # made once
    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_a_sequence_on_access_is_a_tuple_to_whoever_looks():
    made = []
    sequence = OnAccess(lambda: (made.append(1), [3, 1, 2])[1])
    assert not made
    assert sequence == (3, 1, 2) and sequence != (3, 1)
    assert list(sequence) == [3, 1, 2] and sequence[1:] == (1, 2) and len(sequence) == 3 and 2 in sequence
    assert repr(sequence) == "(3, 1, 2)" and hash(sequence) == hash((3, 1, 2)) and made == [1]
    assert sequence != [3, 1, 2]

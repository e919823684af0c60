"""Recomputed blocks: bitwise the same training, at the time and memory that were predicted for it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from graphs import Builder, assignments_for, cluster_of, encoder, images, mlp, precisions_for, profile_of
from graphs import sensitivity_of as sensitivities
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import watched
from traced_models import Checkpointed, X

import qsync
from qsync.allocator import allocate, check_plan
from qsync.errors import FormatError, MismatchError
from qsync.experiments.harness.measured_memory import step_peak_bytes
from qsync.experiments.harness.ranks import process_group_of_one
from qsync.experiments.memory.memory_runs import TINY, Trained, parts_of
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.lowered_graph import Run
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import StepMemory, peak_memory
from qsync.predictor.memory.vectorized_peak import vectorized_bytes
from qsync.records.levers import CarriedTo, ClassLevers, Levers
from qsync.records.plans import ClassPlan, Plan
from qsync.records.save_less import ops_that_save_less
from qsync.replayer import peaks, profiles_under_levers, replay
from qsync.replayer.levers.recomputation import RANDOM_STATE, blocks, mark_recomputed, with_recomputation
from qsync.runtime import choosers, planned_forward
from qsync.runtime.activation_recomputation import recompute

FP32, BF16 = Precision.FP32, Precision.BF16
GRAPH = encoder(2)
BLOCKS = ("layer.0", "layer.1")
ROWS, WIDTH = 1024, 16
VALUE = 4 * ROWS * WIDTH


def plan_of(model, *paths):
    graph = qsync.capture(model, X)
    classes = {"infer": ClassPlan({op.name: FP32 for op in graph.adjustable})}
    return Plan(graph.model, graph.hash, classes, levers=Levers({"infer": ClassLevers(recomputed=paths)}))


def test_a_plan_s_blocks_run_twice_and_train_bitwise_alike():
    plain = Checkpointed(enabled=False)
    model = copy.deepcopy(plain)
    qsync.wrap(plain, plan_of(plain))
    qsync.wrap(model, plan_of(copy.deepcopy(model), "layers.0", "layers.2"))
    assert type(model) is Checkpointed and list(model.state_dict()) == list(plain.state_dict())
    for one in (plain, model):
        one(X).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    watcher = watched(model, dict.fromkeys(("layers.0.0", "layers.1.0"), FP32))
    model(X).backward()
    ran = [getattr(node, "op", None) for node in watcher.nodes]
    assert (ran.count("layers.0.0"), ran.count("layers.1.0")) == (2, 1)


def test_what_is_recomputed_saves_as_torch_does_priced_and_run():
    model = Checkpointed(enabled=False)
    graph, plan = qsync.capture(model, X), plan_of(copy.deepcopy(model), "layers.0").save_less("layers.*")
    qsync.wrap(model, plan)
    model(X).backward()
    profiles = {"infer": profile_of(graph, saving=1.3)}
    there = mark_recomputed(graph, ["layers.0"])
    setting = CarriedTo(there, 2, graph.shapes_hash, 2, plan.levers["infer"], (graph, profiles["infer"]))
    at = replace(profiles["infer"], setting=setting)
    timeline = replay(graph, plan, {"infer": at}, cluster_of({"infer": 1}))
    priced = {node.op: node.form for node in timeline["infer"].nodes if isinstance(node, Run)}
    ran = {
        node.op: node.form
        for part in planned_forward.program_of(model).lowered
        for node in part.nodes
        if isinstance(node, Run)
    }
    less = {name for name, form in ran.items() if form != "plain"}
    assert less and all(name.startswith(("layers.1", "layers.2")) for name in less)
    assert {name: priced[name] for name in less} == {name: ran[name] for name in less}
    assert not any(form != "plain" for name, form in priced.items() if name not in less)


def test_other_plans_undo_it_and_evaluation_knows_nothing_of_it():
    model = Checkpointed(enabled=False)
    recompute(model, ["layers.0", "layers.1"])
    recompute(model, ["layers.1"])
    assert "forward" not in vars(model.layers[0]) and "forward" in vars(model.layers[1])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), model(X))
    with pytest.raises(MismatchError, match="recomputes 'layers.9', which Checkpointed lacks"):
        recompute(model, ["layers.9"])
    model.eval()
    assert model(X).grad_fn is not None and torch.equal(model(X), Checkpointed(enabled=False)(X))
    recompute(model, [])
    assert "forward" not in vars(model.layers[1])


def test_the_blocks_of_a_model_are_what_is_numbered():
    assert blocks(GRAPH) == BLOCKS
    assert blocks(images(2)) == ()  # they hold batch norms
    with pytest.raises(
        FormatError, match=r"0 cannot be recomputed: 0.conv1.norm would count every batch twice"
    ):
        mark_recomputed(images(2), ["0"])
    with pytest.raises(FormatError, match="no operator of encoder belongs to 'layer.7'"):
        mark_recomputed(GRAPH, ["layer.7"])
    with pytest.raises(FormatError, match="layer.0 lies within layer, and both"):
        mark_recomputed(GRAPH, ["layer", "layer.0"])
    builder = Builder("sequence")
    x = builder.linear("stem.0", builder.enter("x", (4, 4)), 4)
    builder.linear("body.1.fc", builder.linear("body.0.fc", x, 4), 4)
    assert blocks(builder.build()) == ("body.0", "body.1")  # stem.0 is an operator, and holds no other
    builder = Builder("torn")
    x = builder.linear("a.0.fc1", builder.enter("x", (4, 4)), 4)
    x = builder.linear("a.0.fc2", builder.linear("b", x, 4), 4)
    with pytest.raises(FormatError, match="a.0 cannot be recomputed as one block: b runs between"):
        mark_recomputed(builder.build(), ["a.0"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_recomputed_block_costs_its_forward_once_more_but_for_casts_of_weights_that_are_kept(device):
    assignment = {op.name: BF16 for op in GRAPH.adjustable}
    profile = replace(profile_of(GRAPH, "infer"), machine={"device": device})
    cluster = cluster_of({"infer": 2}, device=device)
    plain = replay(GRAPH, {"infer": assignment}, {"infer": profile}, cluster)
    twice = profiles_under_levers(
        GRAPH, {"infer": profile}, cluster, Levers({"infer": ClassLevers(recomputed=BLOCKS[:1])})
    )
    found = replay(GRAPH, {"infer": assignment}, twice, cluster)
    forward = [e for e in plain.events if e.kind in ("forward", "cast") and e.name.startswith("layer.0")]
    total = sum(e.duration_s for e in plain.events if e.kind == "forward" and e.name.startswith("layer.0."))
    assert forward and total > 0
    more = found["infer"].compute_s - plain["infer"].compute_s
    casts = sum(
        profile.cast_fit[c.source, c.target][0].forward_s
        + profile.cast_fit[c.source, c.target][1].forward_s * c.num_elements
        for c in plain["infer"].nodes
        if hasattr(c, "target")
        and not (c.of_parameter and device == "cpu")
        and (c.value.startswith("layer.0") or c.value == "embedding")
    )
    assert more == pytest.approx(total + casts, rel=1e-6)


def test_recomputing_keeps_what_enters_a_block_and_no_more():
    builder = Builder()
    x = builder.enter("x", (ROWS, WIDTH))
    for layer in (0, 1):
        for name in ("fc1", "fc2", "fc3"):
            x = builder.linear(f"layer.{layer}.{name}", x, WIDTH)
            x = builder.follow(f"layer.{layer}.{name}.gelu", "gelu", x)
    builder.loss("loss", x)
    graph = builder.build()
    plain, twice = (peak_memory(lower(g, {})) for g in (graph, mark_recomputed(graph, ["layer.0"])))
    # When the loss is there: of six values a block keeps only the last, which enters the other one.
    assert plain.saved == 12 * VALUE and twice.saved == 7 * VALUE
    both = peak_memory(lower(mark_recomputed(graph, ["layer.0", "layer.1"]), {}))
    assert both.estimate_bytes - both.margin < twice.estimate_bytes < plain.estimate_bytes
    assert twice.inputs == plain.inputs + 8 * RANDOM_STATE


@settings(max_examples=25)
@given(st.data())
def test_vectorized_and_whole_memory_of_recomputed_blocks_agree(data):
    graph = mark_recomputed(GRAPH, data.draw(st.sampled_from([BLOCKS, BLOCKS[:1], BLOCKS[1:]])))
    assignment = data.draw(assignments_for(graph))
    less = ops_that_save_less(graph, data.draw(st.sampled_from([[], ["*"], ["layer.0.*"]])))
    for changed in ({}, dict([data.draw(precisions_for(graph))])):
        assignment |= changed
        anew = StepMemory(lower(graph, assignment, "bf16", less), num_ranks=2).peak_bytes
        assert vectorized_bytes(Lowering(graph, assignment, "bf16", less), num_ranks=2).max() == anew


@pytest.mark.parametrize(
    ("precision", "saving", "kept"),
    [("fp32", (), True), ("bf16", (), True), ("bf16", ("*",), True), ("bf16", (), False)],
    ids=["fp32", "bf16", "saving less", "casts of weights are made again"],
)
def test_the_peak_is_what_is_predicted(precision, saving, kept, monkeypatch, fast_products):
    for module in ("backend.selection.kernel_selection", "predictor.memory.lifetimes"):
        monkeypatch.setattr(f"qsync.{module}.keeps_weight_casts", lambda device: kept)
    with process_group_of_one():
        torch._dynamo.reset()
        model, batch, loss_fn = parts_of(TINY)
        trained = Trained(model, batch, loss_fn)
        (path,) = blocks(trained.graph)
        torch._dynamo.reset()
        recompute(model, [path])
        again = Trained(model, batch, loss_fn)
        assert again.graph.hash == trained.graph.hash
        assignment = {op.name: Precision(precision) for op in again.graph.adjustable if op.kind == "linear"}
        again.program.choose(lambda graph: assignment, None, choosers.saving(saving, [path]))
        for _ in range(2):
            again.step()
        measured = again._throughout() + step_peak_bytes(again.step, torch.device("cpu"))
        graph = mark_recomputed(trained.graph, [path])
        # What a recomputed block keeps waits for a moment only: there nothing saves less.
        assert not any(name.startswith(path) for name in ops_that_save_less(graph, saving))
        lowered = lower(graph, assignment, "bf16", ops_that_save_less(graph, saving))
        found = peak_memory(lowered, optimizer_bytes=again.optimizer_bytes, num_ranks=2)
        assert 0.97 * found.estimate_bytes <= measured <= found.peak_bytes


def test_a_plan_may_recompute_where_nothing_else_fits():
    graph, cluster = encoder(2, rows=512), cluster_of()
    profiles = {name: profile_of(graph, name, slow=s) for name, s in (("train", 1.0), ("infer", 1.5))}
    both = Levers({"infer": ClassLevers(recomputed=BLOCKS)})
    twice = profiles_under_levers(graph, profiles, cluster, both)
    pins = {"*": "fp32"}
    plain = allocate(graph, profiles, sensitivities(graph), cluster, pins=pins, target_s=10.0)
    plan = allocate(graph, twice, sensitivities(graph), cluster, pins=pins, target_s=10.0)
    assert plan["infer"].predicted.memory_bytes < plain["infer"].predicted.memory_bytes
    assert plan["infer"].predicted.compute_s > plain["infer"].predicted.compute_s
    assert plan.levers.used == ("recompute",) and plan.levers["infer"].recomputed == BLOCKS
    assert check_plan(graph, plan, twice, sensitivities(graph), cluster).ok
    shown = peaks(graph, plan, twice, cluster)["infer"]
    assert shown.peak_bytes == plan["infer"].predicted.memory_bytes
    # What has no samples to share is not asked for a second capture.
    assert with_recomputation(profiles["infer"], graph) is profiles["infer"] and mlp().recomputed == ()
    assert Role.ADJUSTABLE in {op.role for op in graph.ops}

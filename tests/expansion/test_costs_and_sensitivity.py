"""What a grown model inherits of sensitivities and profiles: a guess that says so, near what is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

import qsync
from qsync.errors import FormatError, MismatchError
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.transfer.costs_and_sensitivity import NEW_BLOCK_ERROR_SHARE
from qsync.expansion.transfer.scaling import gradient_gain, rounding_gain
from qsync.experiments.workloads.gpt import Gpt
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import OpGraph
from qsync.records.profiles import CARRIED, Cost, Profile, Sensitivity, shown

TOKENS = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def small_model() -> Gpt:
    """A GPT that has learned a little."""
    torch.manual_seed(0)
    model = Gpt(2, 32, 4, 16, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss(model, TOKENS).backward()
        optimizer.step()
    return model


def grown(
    model: torch.nn.Module, split: str = "random", **sizes: int
) -> tuple[torch.nn.Module, ExpansionPlan]:
    recipe = qsync.recipe_of(model).to(**sizes)
    return qsync.expand(model, recipe, split=split), qsync.plan_expansion(model, recipe, split=split)


def gathered(model: torch.nn.Module) -> Sensitivity:
    return qsync.sensitivity(model, [TOKENS], loss, precisions=["bf16", "int8"])


def made_up(graph: OpGraph, value: float = 1.0) -> Sensitivity:
    return Sensitivity(
        graph.hash, "variance", {op.name: {"bf16": value, "int8": 4 * value} for op in graph.adjustable}
    )


def profiled(graph: OpGraph) -> Profile:
    """Costs that grow with what operators compute, as if measured."""
    ops = {
        op.name: {
            str(p): Cost(1e-5 + op.flops / rate + op.num_elements * 1e-9, 2e-5 + 2 * op.flops / rate)
            for p, rate in zip(PRECISIONS, (5e10, 1e11, 2e11), strict=True)
        }
        for op in graph.ops
    }
    casts = {
        (name, "fp32", "bf16"): Cost(1e-6, 1e-6) for op in graph.adjustable for name in op.inputs
    }  # fmt: skip
    types = ("fp32", "bf16", "int8_row", "int8_col")
    fit = {(s, t): (Cost(1e-6, 1e-6), Cost(1e-10, 1e-10)) for s in types for t in types}
    return Profile(
        "train", graph.hash, graph.shapes_hash, ops, casts, fit, Cost(1e-4, 1e-4), 1e-3, 2e-3, 1000,
        {"fp32": 0.1}, {"device": "cpu"}, error=0.01,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Any:
    model = small_model()
    return model, qsync.capture(model, TOKENS), gathered(model)


@pytest.mark.parametrize(
    ("sizes", "least"),
    [({"width": 48}, 0.9), ({"layers": 4}, 0.85), ({"width": 48, "layers": 3}, 0.85)],
    ids=["wider", "deeper", "both"],
)
def test_the_guess_ranks_operators_as_fresh_statistics_do(small, sizes, least):
    """Also those of new blocks, and they are as large, within some parts."""
    model, graph, sensitivity = small
    big, plan = grown(model, **sizes)
    fresh = gathered(big)
    guess = qsync.carry_sensitivity(sensitivity, graph, qsync.capture(big, TOKENS), plan)
    assert guess.omega.keys() == fresh.omega.keys() and guess.graph_hash == fresh.graph_hash
    for precision in ("bf16", "int8"):
        pairs = [(guess.omega[op][precision], fresh.omega[op][precision]) for op in guess.omega]
        assert spearmanr(pairs)[0] > least
        ratios = sorted(a / b for a, b in pairs)
        assert 1 / 3 < ratios[len(ratios) // 2] < 3


@pytest.mark.parametrize(
    ("split", "inner"), [("even", 1.0), ("random", 2 * (0.5 + 0.5 + 1.0))], ids=["even", "random"]
)
def test_the_gradient_grows_by_what_comes_down_the_maps(small, split, inner):
    """Twice the width: the hidden's gradient is half, and where copies were drawn to differ, that and the
    stream's, which in turn is half and the head's. The input of fc is there twice."""
    model = small[0]
    _, plan = grown(model, split=split, width=64)
    head = 2.0  # of which the logits' gradient is as it was
    writes_stream = 2.0 * (0.5 if split == "even" else 0.5 + 1.0)
    embeds = writes_stream / 2.0
    wanted = (head + 2 * 2 * (inner + writes_stream) + 2 * embeds) / 11
    assert gradient_gain(plan) == pytest.approx(wanted)


def test_a_gain_is_near_the_gradient_of_the_grown_model(small):
    model = small[0]

    def square(model: torch.nn.Module) -> float:
        found = torch.autograd.grad(loss(model, TOKENS), list(model.parameters()))
        return sum(float(g.square().sum()) for g in found)

    for split, sizes in (("random", {"width": 64}), ("even", {"width": 64}), ("random", {"width": 48})):
        big, plan = grown(model, split=split, **sizes)
        assert gradient_gain(plan) == pytest.approx(square(big) / square(model), rel=0.6)


def test_parts_that_differ_are_rounded_each_by_itself(small):
    model, graph, _ = small
    gains = {}
    for split in ("even", "scalar", "random"):
        big, plan = grown(model, split=split, width=64)
        gains[split] = rounding_gain(plan.tensors["blocks.0.mlp.fc.weight"])
    assert gains["even"] == 1.0 and gains["random"] == 1.5
    assert 0.5 < gains["scalar"] < 0.7
    guess = qsync.carry_sensitivity(made_up(graph), graph, qsync.capture(big, TOKENS), plan).omega
    assert guess["blocks.0.mlp.fc"]["bf16"] / guess["blocks.0.attention"]["bf16"] == pytest.approx(1.25)


def test_a_new_block_is_silent_and_stands_between_two(small):
    model, graph, _ = small
    big, plan = grown(model, layers=3)
    source, path = next((p.source, p.path) for ps in plan.depth.grown_blocks.values() for p in ps if p.is_new)
    flat = made_up(graph)
    flat.omega[f"{source}.mlp.fc"]["bf16"] = 4.0
    guess = qsync.carry_sensitivity(flat, graph, qsync.capture(big, TOKENS), plan)
    old = next(p.path for p in plan.depth.grown_blocks[source] if not p.is_new)
    between = 2.0 if source == "blocks.0" else 4.0  # the last block has none behind it
    assert guess.omega[f"{path}.mlp.fc"]["bf16"] == pytest.approx(NEW_BLOCK_ERROR_SHARE * between)
    assert guess.omega[f"{old}.mlp.fc"]["bf16"] == pytest.approx(4.0)


def test_a_carried_profile_prices_every_operator_of_the_grown_model_and_says_so(small):
    model, graph, _ = small
    big, plan = grown(model, width=48, layers=3)
    target = qsync.capture(big, TOKENS)
    profile = profiled(graph)
    guess = qsync.carry_profile(profile, graph, target, plan)
    guess.check_graph(target)
    fresh = profiled(target)
    assert guess.ops.keys() == fresh.ops.keys() and guess.origin == CARRIED
    assert guess.filled.keys() >= {op.name for op in target.adjustable}
    assert "carried" in shown("train", guess.origin)
    assert guess.optimizer_bytes > 2 * profile.optimizer_bytes and guess.error > profile.error
    for op in target.adjustable:
        for mode, cost in fresh.ops[op.name].items():
            assert guess.ops[op.name][mode].total_s == pytest.approx(cost.total_s, rel=0.5)
    assert ("blocks.2.mlp.fc.weight", "fp32", "bf16") in guess.casts
    assert Profile.from_json(guess.to_json()).origin == CARRIED


def test_a_plan_from_carried_guesses_is_one_of_the_grown_model(small):
    model, graph, sensitivity = small
    big, plan = grown(model, width=48, layers=3)
    target = qsync.capture(big, TOKENS)
    profile = qsync.carry_profile(profiled(graph), graph, target, plan)
    slow = replace(profile, device_class="infer", host_s=10 * profile.host_s)
    classes = tuple(DeviceClass(name, "cpu", 1, 10**9, PRECISIONS) for name in ("train", "infer"))
    chosen = qsync.plan(
        target, {"train": profile, "infer": slow},
        qsync.carry_sensitivity(sensitivity, graph, target, plan), Cluster(classes, Link(1e-5, 1e9)),
    )  # fmt: skip
    chosen.check_graph(target)
    assert {entry.origin for entry in chosen.classes.values()} == {CARRIED}
    qsync.wrap(big, chosen, device_class="infer")(TOKENS)


def test_another_models_figures_are_refused(small):
    model, graph, sensitivity = small
    big, plan = grown(model, width=48)
    target = qsync.capture(big, TOKENS)
    with pytest.raises(MismatchError, match=r"the sensitivity belongs to graph"):
        qsync.carry_sensitivity(made_up(target), graph, target, plan)
    with pytest.raises(MismatchError, match=r"graph of the grown model has .* of shape"):
        qsync.carry_sensitivity(sensitivity, graph, graph, plan)
    with pytest.raises(MismatchError, match=r"graph of the small model has .* of shape"):
        qsync.carry_sensitivity(made_up(target), target, target, plan)
    lacking = replace(sensitivity, omega={op: m for op, m in sensitivity.omega.items() if op != "head"})
    with pytest.raises(MismatchError, match="head of the grown model has no counterpart"):
        qsync.carry_sensitivity(lacking, graph, target, plan)
    with pytest.raises(MismatchError, match="belongs to another model"):
        qsync.carry_profile(profiled(target), graph, target, plan)


def test_other_records_are_refused_by_name(small):
    model, graph, sensitivity = small
    big, plan = grown(model, width=48)
    target, profile = qsync.capture(big, TOKENS), profiled(graph)
    for wrong, said in (
        ((profile, graph, target, plan), "sensitivity is a Profile, .*; give what qsync.sensitivity"),
        ((None, graph, target, plan), "sensitivity is a NoneType"),
        ((sensitivity, model, target, plan), "small_graph is a Gpt, .*; give what qsync.capture"),
        ((sensitivity, graph, big, plan), "big_graph is a Gpt"),
        ((sensitivity, graph, target, plan.recipe), "plan is a Recipe, .*; give what qsync.plan_expansion"),
    ):
        with pytest.raises(FormatError, match=said):
            qsync.carry_sensitivity(*wrong)
    for wrong, said in (
        ((sensitivity, graph, target, plan), "profile is a Sensitivity, .*; give what qsync.profile"),
        ((profile, graph, target, None), "plan is a NoneType"),
        ((profile, graph, target, plan, 3), "model is a int, 3; give what CostModel.learn"),
    ):
        with pytest.raises(FormatError, match=said):
            qsync.carry_profile(*wrong)

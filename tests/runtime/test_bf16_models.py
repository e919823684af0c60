"""Models loaded in BF16: as they were loaded where nothing is lowered, and lowered from there."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from graphs import cluster_of, profile_of
from reference_lowering import reference_lowering
from torch import nn

import qsync
from qsync.allocator import check_plan
from qsync.backend import select
from qsync.errors import CalibrationError
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.base import base_of_graph
from qsync.records.cluster import Link
from qsync.runtime.choosers import candidates
from qsync.runtime.planned_forward import program_of

BF16, INT8 = Precision.BF16, Precision.INT8


class Loaded(nn.Module):
    """A model with FP32 islands, as Hugging Face's have: a norm and a softmax in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.conv, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        wide = x.float()
        x = (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)
        x = x + self.down(torch.relu(self.up(x)))
        scores = torch.matmul(x, x.mT).softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.head(self.conv(torch.matmul(scores, x)))


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    return Loaded().to(torch.bfloat16), torch.randint(50, (4, 8))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def gradients(model, ids):
    model.zero_grad()
    loss_of(model, ids).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("asked", [{"plan": "bf16"}, {"base": "bf16"}])
def test_in_bf16_it_is_the_model_as_loaded(loaded, asked):
    model, ids = loaded
    expected = gradients(copy.deepcopy(model), ids)
    found = gradients(qsync.wrap(model, **asked), ids)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", [BF16, INT8])
def test_no_operator_leaves_the_type_in_which_it_was_loaded(loaded, precision):
    """Whatever a timing says: in FP32 the model would not be the one that was loaded."""
    model, ids = loaded
    graph = qsync.capture(model, (ids,))
    wanted = {op.name: precision for op in graph.adjustable if precision in PRECISIONS_BY_KIND[op.kind]}
    found = candidates(graph, wanted, select("cpu"))
    assert wanted and all(up[0] is wanted[op] and up[-1] is BF16 for op, up in found.items())


@pytest.mark.parametrize("precision", ["int8", "int8_all"])
def test_it_is_lowered_from_bf16(loaded, precision, capsys):
    model, ids = loaded
    expected = gradients(copy.deepcopy(model), ids)
    found = gradients(qsync.wrap(model, precision, strict=True), ids)
    assert f"in {precision}" in capsys.readouterr().err
    differ = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype is torch.bfloat16
        difference = (one.float() - other.float()).norm() / other.float().norm()
        assert difference < 0.2
        differ = max(differ, float(difference))
    assert differ > 1e-3
    modes = {
        node.op: node for part in program_of(model).lowered for node in part.nodes if hasattr(node, "op")
    }
    assert modes["up"].mode == precision and modes["up"].output == "bf16"
    assert modes["table.embedding"].mode == "bf16"


def test_a_product_that_is_not_lowered_runs_as_traced_without_casts(loaded):
    model, ids = loaded
    graph = qsync.capture(model, ids)
    assert {op.kind for op in graph.adjustable} == {"linear", "matmul", "conv1d"}
    for precision in (Precision.FP32, Precision.TF32, BF16, Precision.FP16):
        names = [op.name for op in graph.adjustable if precision in PRECISIONS_BY_KIND[op.kind]]
        nodes = lower(graph, dict.fromkeys(names, precision), "bf16").nodes
        assert not [node for node in nodes if isinstance(node, Cast)], precision


def test_every_product_returns_bf16_and_the_table_lowers_as_the_rules_do(loaded):
    model, ids = loaded
    graph, draw = qsync.capture(model, ids), random.Random(0)
    for _ in range(20):
        assignment = {op.name: draw.choice(PRECISIONS_BY_KIND[op.kind]) for op in graph.adjustable}
        for carried in ("bf16", None):
            lowered = lower(graph, assignment, carried)
            assert all(n.output == "bf16" for n in lowered.nodes if getattr(n, "op", "") in assignment)
            assert lowered == reference_lowering(graph, assignment, carried)


def test_sensitivity_is_above_bf16_and_leaves_the_weights_as_they_were(loaded):
    model, ids = loaded
    before = [p.clone() for p in model.parameters()]
    found = qsync.sensitivity(model, [ids], loss_of)
    assert found.graph_hash == qsync.capture(model, ids).hash
    assert all(modes["int8"] > 0 and modes["bf16"] > 0 for modes in found.omega.values())
    for one, other in zip(model.parameters(), before, strict=True):
        assert one.dtype is torch.bfloat16 and torch.equal(one, other) and one.grad is None
    twin = qsync.sensitivity(copy.deepcopy(model).float(), [ids], loss_of)
    for op, modes in found.omega.items():
        assert modes == pytest.approx(twin.omega[op])


class Switching(Loaded):
    """A model that is another one in FP32."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        return self.extra(x) if x.dtype is torch.bfloat16 else x

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(50, 50)


def test_a_model_that_is_another_in_fp32_is_refused():
    model, ids = Switching().to(torch.bfloat16), torch.randint(50, (4, 8))
    with pytest.raises(CalibrationError, match="Switching has no operator extra when its .* FP32"):
        qsync.sensitivity(model, [ids], loss_of)


class Casting(Loaded):
    """A model that casts by itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.table(ids).bfloat16())


def test_a_model_that_casts_by_itself_is_refused_in_a_sentence():
    model, ids = Casting().to(torch.bfloat16), torch.randint(50, (4, 8))
    with pytest.raises(CalibrationError, match='Casting fails with its weights in FP32.*base="bf16"'):
        qsync.sensitivity(model, [ids], lambda model, ids: model(ids).float().square().mean())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_parameters_of_both_types_are_lowered_from_their_own():
    torch.manual_seed(0)
    model, ids = Loaded().to(torch.bfloat16), torch.randint(50, (4, 8))
    model.head.float()
    model.head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    expected = gradients(copy.deepcopy(model), ids)
    graph = qsync.capture(model, ids)
    assert {op.name: op.dtype for op in graph.adjustable}["head"] == "fp32" and graph.ops[0].dtype == "bf16"
    assert base_of_graph(graph) is Precision.FP32
    assert min(modes["int8"] for modes in qsync.sensitivity(model, [ids], loss_of).omega.values()) > 0
    found = gradients(qsync.wrap(model, "int8", strict=True), ids)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert 0 < (one.float() - other.float()).norm() < 0.2 * other.float().norm()
    nodes = [node for part in program_of(model).lowered for node in part.nodes]
    runs = {node.op: (node.mode, node.output) for node in nodes if not isinstance(node, Cast)}
    assert runs["up"] == ("int8", "bf16") and runs["head"] == ("int8", "fp32")


def test_its_plan_is_made_above_bf16(loaded):
    model, ids = loaded
    graph = qsync.capture(model, ids)
    profiles = {
        name: profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=1e-11)
        for name, slow in (("train", 1.0), ("infer", 1.3))
    }
    sensitivity, cluster = qsync.sensitivity(model, [ids], loss_of), cluster_of(link=Link(0.0, 1e30))
    plan = qsync.plan(graph, profiles, sensitivity, cluster)
    assert plan.base is BF16 and set(plan["train"].assignment.values()) == {BF16}
    assert set(plan["infer"].assignment.values()) == {BF16, INT8}
    assert plan["infer"].lowered and plan["infer"].predicted.added_variance > 0
    assert check_plan(graph, plan, profiles, sensitivity, cluster).ok
    expected = model(ids)
    assert torch.equal(qsync.wrap(copy.deepcopy(model), plan, device_class="train")(ids), expected)
    assert not torch.equal(qsync.wrap(model, plan, device_class="infer")(ids), expected)


def test_a_profile_of_it_times_what_runs(loaded):
    model, ids = loaded
    profile = qsync.profile(model, ids, loss_of, rounds=1, precisions=["fp32", "bf16", "int8"])
    assert {"fp32", "bf16", "int8 narrowing"} <= set(profile.ops["up"])

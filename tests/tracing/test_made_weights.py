"""Products that make weights: they stay in the model's type unless a pin or a plan names them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from traced_models import Applied

import qsync
from qsync.allocator.explanation.unsupported import unsupported_precisions
from qsync.allocator.problem import make_problem
from qsync.allocator.uniform import uniform
from qsync.operators.precision import Precision
from qsync.records.base import base_of
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import Op
from qsync.runtime.planned_forward import program_of

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
INT8 = Precision.INT8


class Merged(nn.Module):
    """LoRA, merged at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(8, 32) / 6), nn.Parameter(torch.randn(32, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight + self.b @ self.a)


class Hypernetwork(nn.Module):
    """A network of a learned constant makes the weights of a layer, in slices that are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.net = (
            nn.Parameter(torch.randn(4, 8)),
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 256)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.net(self.code)
        return F.linear(x, torch.cat([part.view(8, 32) for part in made]))


class Recomputed(Merged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def orthogonal(how: str) -> nn.Module:
    layer = parametrizations.orthogonal(nn.Linear(32, 32), orthogonal_map=how)
    with torch.no_grad():  # away from the start, where it multiplies by one
        layer.parametrizations.weight.original.add_(torch.randn(32, 32) / 10)
    return layer


MAKERS = {
    **{how: lambda how=how: orthogonal(how) for how in ("matrix_exp", "cayley", "householder")},
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(32, 32)), Merged()),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32)), Merged()),
    "lora": Merged,
    "hypernetwork": Hypernetwork,
    "recomputed": Recomputed,
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MAKERS[name](), nn.GELU(), nn.Linear(32, 32))


def of_body(body) -> tuple[Op, ...]:
    return qsync.capture(Applied(body), X[:4, :8]).ops


def made_by(graph: qsync.OpGraph) -> set[str]:
    return {op.name for op in graph.ops if op.makes_weight}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_what_makes_a_weight_keeps_the_type_of_the_model(name, precision):
    model = qsync.wrap(model_of(name), precision, strict=True)
    plain = model_of(name)
    for trained in (model, plain):
        trained(X).square().mean().backward()
    program = program_of(model)
    made, runs = made_by(program.graph), program.assignment()
    assert made and {runs[op] for op in made} == {"fp32"}
    assert {runs[op] for op in runs.keys() - made} == {precision}


def test_the_coverage_says_why():
    model = qsync.wrap(model_of("lora"), "int8", strict=True)
    model(X)
    assert "it reads nothing of the batch: it makes a weight" in str(qsync.coverage(model))


def test_small_steps_of_what_makes_a_weight_lower_the_loss_in_int8():
    """Entries of the orthogonal factor move by less than INT8 resolves beside its ones."""

    def layer() -> nn.Module:
        torch.manual_seed(0)
        return parametrizations.orthogonal(nn.Linear(64, 64, bias=False), orthogonal_map="cayley")

    skew = torch.randn(64, 64) * 1e-3
    target = layer().weight.detach() @ torch.matrix_exp(skew - skew.T)
    x = torch.randn(512, 64)
    model = qsync.wrap(layer(), "int8", strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    losses = []
    for _ in range(12):
        loss = (model(x) - x @ target.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]  # with the factor in INT8 it grows; what is left is the layer's own


def test_a_plan_or_a_pin_that_names_it_lowers_it():
    model = model_of("lora")
    graph = qsync.capture(model, X)
    (made,) = made_by(graph)
    precisions = (Precision.FP32, Precision.BF16, INT8)
    profile = qsync.profile(model, X, lambda m, b: m(b).square().mean(), precisions=precisions, seconds=0.0)
    sensitivity = qsync.sensitivity(model, [X], lambda m, b: m(b).square().mean())
    name = profile.device_class
    cluster = Cluster((DeviceClass(name, "cpu", 1, 2**34, precisions),), Link(1e-5, 1e9))
    records = (graph, {name: profile}, sensitivity, cluster)
    assert set(make_problem(*records).classes[name].choices[made]) == {"fp32"}
    assert uniform(*records[:2], cluster, {name: "int8"}, strict=True)[name].assignment[made] == "fp32"
    pinned = qsync.plan(graph, {name: profile}, sensitivity, cluster, pins={made: "int8"})
    assert pinned[name].assignment[made] == "int8"
    free = qsync.plan(*records)
    kept = {(e.op, e.precision) for e in unsupported_precisions(graph, free, {name: profile}, cluster)}
    assert {(made, "bf16"), (made, "int8")} <= kept
    wrapped = qsync.wrap(copy.deepcopy(model), free.pin(made, "int8"))
    wrapped(X).sum().backward()
    assert program_of(wrapped).assignment()[made] == "int8"


def test_a_base_leaves_it_in_the_model_s_type():
    graph = qsync.capture(model_of("matrix_exp"), X)
    (made,) = (op for op in graph.ops if op.makes_weight)
    assert [base_of(made, base) for base in (Precision.BF16, Precision.TF32)] == ["fp32", "fp32"]


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x @ m.fc1.weight,
        lambda m, x: x + torch.randn(4, 8) @ m.fc1.weight,  # noise that the model draws is data
        lambda m, x: x + torch.zeros(4, 8).normal_() @ m.fc1.weight,
        lambda m, x: x + torch.cat([torch.zeros(4, 8), x]).relu()[4:] @ m.fc1.weight,
        lambda m, x: x + F.embedding(torch.arange(4), m.fc1.weight),  # multiplies nothing
    ],
)
def test_what_computes_on_the_batch_makes_no_weight(body):
    assert not any(op.makes_weight for op in of_body(body))


def test_what_was_written_with_the_batch_makes_no_weight():
    def padded(m, x):
        out = torch.zeros(6, 8)
        out[:4] = x
        return x + (out.relu() @ m.fc1.weight)[:4]

    assert not any(op.makes_weight for op in of_body(padded))


def test_sizes_of_the_batch_are_not_the_batch():
    ops = of_body(lambda m, x: x + m.fc1.weight[: x.shape[0]] @ m.fc2.weight)
    assert [op.name for op in ops if op.makes_weight] == ["matmul"]

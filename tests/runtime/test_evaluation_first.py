"""A planned model that is evaluated before it is trained: the plan is checked when it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qsync
from qsync.errors import MismatchError
from qsync.records.plans import ClassPlan, Plan


class Net(nn.Module):
    """A model with a layer that runs in training alone."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])
        self.head, self.extra = nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.head(self.extra(x) if self.training else x)


X = torch.randn(4, 8)


def plan_of(model: nn.Module) -> Plan:
    graph = qsync.capture(model, X)
    return Plan(
        graph.model,
        graph.hash,
        {"here": ClassPlan({op.name: qsync.Precision.INT8 for op in graph.adjustable})},
    )


def test_evaluation_may_come_first():
    model, plan = Net(), plan_of(Net())
    graph = qsync.capture(Net().eval(), X)
    assert graph.hash != plan.graph_hash
    qsync.wrap(model, plan)
    model.eval()
    with torch.no_grad():
        first = model(X)
        assert not torch.equal(first, Net.forward(model, X)) and torch.equal(first, model(X))  # in INT8
    model.train()
    model(X).sum().backward()


def test_a_plan_of_another_model_is_refused_when_it_trains():
    model = Net(depth=2)
    qsync.wrap(model, plan_of(Net()))
    model.eval()
    with torch.no_grad():
        model(X)
    model.train()
    with pytest.raises(MismatchError, match="lacks 'body.1'"):
        model(X)

"""torch's checkpoint_wrapper changes no name of an operator, as it changes no name of a parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import qsync
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime.planned_forward import program_of


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(8, 2))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear)


def recomputed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=is_block)
    return model


def test_a_plan_fits_the_model_wrapped_before_and_after():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    graph = qsync.capture(net(), x)
    assignment = {op.name: Precision.INT8 for op in graph.adjustable}
    assert qsync.capture(recomputed(net()), x).hash == graph.hash
    plan = Plan(graph.model, graph.hash, {"here": ClassPlan(assignment)})
    found = []
    for model in (
        qsync.wrap(net(), plan),
        qsync.wrap(recomputed(net()), plan),
        recomputed(qsync.wrap(net(), plan)),
    ):
        model(x).square().mean().backward()
        assert program_of(model).assignment() == assignment
        found.append([p.grad for p in model.parameters()])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))

"""A cluster file may take BF16 from a class: its ranks then carry none along edges, as it was priced."""

from __future__ import annotations

import pytest
import torch
from graphs import cluster_of, profile_of
from torch import nn

import qsync
from qsync.allocator.planner import as_plan
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import Precision
from qsync.records.plans import Plan
from qsync.replayer import replay
from qsync.runtime.planned_forward import program_of

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


@pytest.mark.parametrize("precisions", [(FP32, INT8), (FP32, BF16, INT8)], ids=["taken", "left"])
def test_a_rank_carries_the_types_that_its_class_was_priced_with(precisions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8))
    x = torch.randn(16, 32)
    graph = qsync.capture(model, x)
    cluster = cluster_of(precisions=precisions)
    profiles = {name: profile_of(graph, name, precisions) for name in ("train", "infer")}
    lowered = dict.fromkeys((op.name for op in graph.adjustable), INT8)
    plan = as_plan(graph, {"train": {}, "infer": lowered}, profiles, cluster)
    plan = Plan.from_json(plan.to_json())  # as the other ranks get it
    assert plan["infer"].carries_16bit == (BF16 in precisions)
    priced = replay(graph, plan, profiles, cluster).sequence("infer")
    qsync.wrap(model, plan, device_class="infer")
    model(x).sum().backward()
    (ran,) = program_of(model).lowered
    assert [node for node in ran.nodes if isinstance(node, Run)] == [n for n in priced if isinstance(n, Run)]
    carried = {node.output for node in ran.nodes if isinstance(node, Run)}
    assert ("bf16" in carried) == (BF16 in precisions)

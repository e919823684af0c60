"""A loss that calls the model several times is planned as so many calls; new shapes are announced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qsync
from qsync.api import trace_step
from qsync.errors import FormatError
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import peak_memory
from qsync.predictor.memory.vectorized_peak import vectorized_bytes
from qsync.predictor.profiling.clocks import WallClock
from qsync.predictor.profiling.node_timer import NodeTimer
from qsync.records.graph import OpGraph
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime import choosers, coverage, planned_forward
from qsync.runtime.wrapping import plan_of, swap_plan


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def triplet(model, batch):
    anchor, positive, negative = (model(x) for x in batch)
    return ((anchor - positive).square().sum(-1) - (anchor - negative).square().sum(-1) + 1).relu().mean()


def once(model, batch):
    return model(batch[0]).square().mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Encoder()


def batch(rows: int = 24):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 32, generator=generator) for _ in range(3)]


def test_the_graph_says_how_many_calls_a_step_has(model):
    graph = trace_step(model, batch(), triplet)
    assert graph.num_calls == 3 and trace_step(model, batch(), once).num_calls == 1
    assert [op.name for op in graph.adjustable] == ["first", "second"]
    assert OpGraph.from_json(graph.to_json()) == graph
    with pytest.raises(FormatError, match="num_calls"):
        OpGraph.from_json({**graph.to_json(), "num_calls": "three"})


def teacher(model, batch):
    with torch.no_grad():
        target = model(batch[1])
    return (model(batch[0]) - target).square().mean()


def test_a_call_without_gradients_is_none(model):
    assert trace_step(model, batch(), teacher).num_calls == 1
    assert qsync.sensitivity(model, [batch()], teacher).omega["first"]["int8"] > 0


def nodes_of(model, loss):
    """The nodes of one timed step, with the forward seconds that a clock which counts calls gives them."""

    class Counting(WallClock):
        ticks = 0.0

        def now(self):
            self.ticks += 1.0
            return self.ticks

    timer = NodeTimer(Counting())
    program = planned_forward.attach(model, choosers.uniform(Precision.BF16))
    loss(model, batch())
    program.choose(choosers.uniform(Precision.BF16), timer)
    timer.start()
    value = loss(model, batch())
    timer.loss_ready()
    value.backward()
    return {n.op: cost for n, cost in timer.finish().nodes if isinstance(n, Run)}


def test_an_operator_takes_the_time_of_all_calls(model):
    one, three = nodes_of(model, once), nodes_of(model, triplet)
    assert list(one) == list(three)
    assert three["first"].forward_s == 3 * one["first"].forward_s > 0
    assert three["first"].backward_s > 2 * one["first"].backward_s


def test_all_calls_save_for_backward(model):
    graph, single = trace_step(model, batch(), triplet), trace_step(model, batch(), once)
    for precision in (Precision.FP32, Precision.BF16, Precision.INT8):
        assignment = dict.fromkeys(("first", "second"), precision)
        three, one = (peak_memory(lower(g, assignment, "bf16")) for g in (graph, single))
        assert (three.saved, three.casts) == (3 * one.saved, 3 * one.casts)
        assert three.inputs == 3 * one.inputs and three.parameters == one.parameters
        assert vectorized_bytes(Lowering(graph, assignment, "bf16")).max() == three.peak_bytes


def mean_of_three(model, batch):
    return sum(once(model, batch) for _ in range(3)) / 3


def test_one_rounded_weight_errs_in_all_calls_alike(model):
    """A mean over equal calls has the weight's error of one call, and a third of its activations'."""
    found = qsync.sensitivity(model, [batch()], mean_of_three)
    single = qsync.sensitivity(model, [batch()], once)
    for op in ("first", "second"):
        for precision in ("bf16", "int8"):
            assert single.omega[op][precision] / 3 < found.omega[op][precision] < single.omega[op][precision]


def test_shapes_that_were_never_profiled_are_announced_once(model, capsys):
    graph = qsync.capture(model, batch(24)[0])
    assignment = dict.fromkeys(("first", "second"), Precision.BF16)
    plan = Plan(graph.model, graph.hash, {"all": ClassPlan(assignment)}, batch=graph.batch_shapes)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(FormatError, match="batch"):
        Plan.from_json({**plan.to_json(), "batch": 24})
    qsync.wrap(model, plan)
    model(batch(24)[0])
    assert "never profiled" not in capsys.readouterr().err
    model(batch(10)[0])  # the last batch of an epoch
    assert "never profiled" not in capsys.readouterr().err
    torch._dynamo.reset()
    qsync.wrap(model, plan)
    for rows in (24, 30, 30, 28, 31):
        model(batch(rows)[0])
    said = capsys.readouterr().err
    assert (
        said.count(f"qsync: {graph.model}: a batch of 30x32 was never profiled: it runs as planned for 24x32")
        == 1
    )
    assert said.count("never profiled") == 1
    assert qsync.wrap(model, plan) is model and coverage.say_once.cache_info().currsize


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, whole):
        x = self.first(x)
        return self.last(x + self.extra(x) if whole else x)


@pytest.mark.parametrize("planned", [True, False])
def test_the_first_call_may_take_another_branch_than_the_example_batch(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.2")
    torch.manual_seed(0)
    model, x = Branched(), torch.randn(4, 8)
    expected = {whole: model(x, whole) for whole in (False, True)}
    model = qsync.hybrid(
        model, (x, planned), lambda model, batch: model(*batch).square().mean(),
        base="fp32", precisions=["fp32"], cache_dir=tmp_path,
    )  # fmt: skip
    for whole in (not planned, planned):
        model(x, whole).sum().backward()
        assert torch.equal(model(x, whole), expected[whole])
    assert model.extra.weight.grad is not None
    plan = plan_of(model)
    model(x, not planned)
    swap_plan(model, plan.pin("*", "fp32"), next(iter(plan.classes)))
    assert torch.equal(model(x, planned), expected[planned])

"""A plan that lowers nothing on a class leaves the model as torch runs it: nothing is traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from counting import num_calls
from torch import nn
from torch.distributed.fsdp import fully_shard

import qsync
from qsync.errors import MismatchError, UnsupportedError
from qsync.experiments.harness.ranks import process_group_of_one
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime.planned_forward import program_of, take_over
from qsync.runtime.wrapping import Wrapping, swap_plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def plan_of(graph, low: Precision) -> Plan:
    classes = {"strong": Precision.FP32, "weak": low}
    made = {name: ClassPlan(dict.fromkeys(("up", "down"), p)) for name, p in classes.items()}
    return Plan(graph.model, graph.hash, made)


def wrap_fitting(model: nn.Module, plan: Plan, speaks: bool = False) -> None:
    """Wrap a model for the strong class, as `hybrid` does with a plan that it made of the model."""
    take_over(model, replace(Wrapping.of(plan, "strong", False), speaks=speaks, fits=True))


@pytest.fixture
def planned():
    model, x = Net(), torch.randn(4, 8)
    return model, x, plan_of(qsync.capture(model, x), Precision.BF16)


def test_the_model_s_own_forward_runs_and_nothing_is_traced(planned, capsys):
    model, x, plan = planned
    expected = model(x)
    wrap_fitting(model, plan, speaks=True)
    for _ in range(3):
        assert torch.equal(model(x), expected)
    assert program_of(model).runs_as_torch and not program_of(model).rewritten
    assert capsys.readouterr().err == (
        "qsync: Net: 0 of 2 products in low precision on strong (2 fp32); see qsync.coverage(model)\n"
    )
    (row,) = qsync.coverage(model).rows
    assert row.operators == ("up", "down") and "the model runs as torch runs it" in row.because


def test_a_call_costs_a_few_python_calls(planned):
    model, x, plan = planned
    plain = num_calls(lambda: model(x))
    wrap_fitting(model, plan)
    model(x)
    assert num_calls(lambda: model(x)) <= plain + 25  # of 200 in a step of DDP


def test_a_plan_from_elsewhere_is_checked_by_one_trace(planned):
    model, x, plan = planned
    qsync.wrap(model, plan, device_class="strong")
    assert not program_of(model).runs_as_torch
    model(x)
    (ran,) = program_of(model).rewritten
    ran.forward = None  # no later call runs it
    model(x)
    other = nn.Sequential(nn.Linear(8, 8))
    qsync.wrap(other, plan, device_class="strong")
    with pytest.raises(MismatchError):
        other(x)


def test_a_lowered_class_is_traced_and_plans_are_swapped_both_ways(planned):
    model, x, plan = planned
    expected = model(x)
    wrap_fitting(model, plan)
    model(x)
    swap_plan(model, plan, "weak")
    assert not torch.equal(model(x), expected) and program_of(model).rewritten
    swap_plan(model, plan, "strong")
    assert torch.equal(model(x), expected)


def test_autocast_is_refused_or_switched_off_as_for_lowered_models(planned):
    model, x, plan = planned
    expected = model(x)
    wrap_fitting(model, plan)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="plan's base is fp32"):
        model(x)
    above = Plan(plan.model, plan.graph_hash, plan.classes, base=Precision.BF16)
    wrap_fitting(model, above)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)


def test_blocks_of_a_sharded_model_stay_as_they_are(planned):
    model, x, plan = planned
    expected = model(x)
    wrap_fitting(model, plan)
    with process_group_of_one():
        fully_shard(model.up), fully_shard(model)
        assert torch.equal(model(x), expected)
        assert "forward" not in vars(model.up)

"""Autograd functions of the user's: those by elements run in the type that they read, others as traced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsync
from qsync.lowering.lowered_graph import Run
from qsync.predictor.memory.peak import peak_memory
from qsync.runtime import planned_forward

pytestmark = pytest.mark.filterwarnings(  # torch.compile does it when a model has a function of its own
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)


class Curve(torch.autograd.Function):
    """An activation with a backward of its own, by elements."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1.0 + torch.tanh(x))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        t = torch.tanh(x)
        return gradient * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t))


class Typed(Curve):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1.0 + torch.tanh(x.to(torch.float32)))


class Summed(Curve):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / x.exp().sum(-1, keepdim=True)


class Large(Curve):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x * 1e6)


class TypedBackward(Curve):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.float() * ctx.saved_tensors[0]


class Two(Curve):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5, torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient, other):
        return gradient * 0.5 + other * ctx.saved_tensors[0]


class Sign(Curve):
    """Its gradient needs nothing that forward had."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(32, 48), nn.Linear(48, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function.apply(self.first(x))
        return self.second(sum(y) if isinstance(y, tuple) else y)


def ran(model: nn.Module) -> Run:
    """The run of the function of a wrapped model."""
    program = planned_forward.program_of(model)
    (name,) = [op.name for op in program.graph.ops if op.inputs == ("first",)]
    (run,) = [n for lowered in program.lowered for n in lowered.nodes if isinstance(n, Run) and n.op == name]
    return run


def test_a_function_by_elements_is_as_under_autocast():
    torch.manual_seed(0)
    model, x = Net(Curve), torch.randn(16, 32)
    plain, wrapped = copy.deepcopy(model), qsync.wrap(copy.deepcopy(model), base="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    expected.float().sum().backward()
    result = wrapped(x)
    result.float().sum().backward()
    assert ran(wrapped).operands == ("bf16",)
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=0)
    for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("function", [Typed, Summed, Large, TypedBackward, Two])
def test_any_other_function_runs_as_traced(function):
    torch.manual_seed(0)
    model, x = Net(function), torch.randn(16, 32)
    wrapped = qsync.wrap(model, "bf16", strict=True)
    wrapped(x).sum().backward()
    assert ran(wrapped).operands == ("fp32",)
    assert model.first.weight.grad.isfinite().all()


@pytest.mark.parametrize(("function", "num_values"), [(Curve, 2), (Sign, 1)])
def test_a_function_that_saves_nothing_is_known(function, num_values):
    wrapped = qsync.wrap(Net(function), "fp32", bitwise=True, strict=True)
    wrapped(torch.randn(16, 32))
    (lowered,) = planned_forward.program_of(wrapped).lowered
    # What the function returns is kept by the second layer.
    assert sum(peak_memory(lowered).saved_by.values()) == num_values * 4 * 16 * 48

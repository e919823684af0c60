"""The forward in a model's place: what stays the module's own, and what is undone."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from models import MLP, build, step
from torch import nn

import qsync
from qsync.errors import UnsupportedError
from qsync.runtime.activation_recomputation import recompute
from qsync.runtime.planned_forward import program_of
from qsync.tracing.replaced_forward import is_replaced, plain_copy, plain_forward, running_plain


def modes_of(model: nn.Module) -> set[str]:
    lowered = program_of(model).lowered
    names = {op.name for part in lowered for op in part.graph.adjustable}
    return {n.mode for part in lowered for n in part.nodes if getattr(n, "op", None) in names}


def test_the_signature_is_the_module_s():
    model = qsync.wrap(MLP(), "int8", strict=True)
    assert inspect.signature(model.forward) == inspect.signature(MLP().forward)


def test_a_forward_of_the_instance_is_lowered_and_given_back():
    model = nn.Linear(8, 8)
    plain, x = copy.deepcopy(model), torch.randn(4, 8)

    def twice(value):
        return plain(value) + model.__class__.forward(model, value)

    model.forward = twice
    expected = model(x)
    qsync.wrap(model, "bf16", strict=True)
    assert modes_of(model) == set() and not torch.equal(model(x), expected) and modes_of(model) == {"bf16"}
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    assert plain_forward(model) is twice
    qsync.wrap(model, "int8", strict=True)
    assert plain_forward(model) is twice
    assert torch.equal(qsync.unwrap(model)(x), expected) and model.forward is twice


def test_a_forward_put_around_it_calls_what_stands_there_now():
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    expected, graph = model(x), qsync.capture(model, x)
    inner = qsync.wrap(model, "bf16", strict=True).forward
    model.forward = around = lambda value: inner(value) + 1
    planned = model(x)
    assert is_replaced(model) and not torch.equal(planned, expected + 1)
    with running_plain(model):
        assert torch.equal(model(x), expected) and not is_replaced(model)
    assert torch.equal(model(x), planned) and qsync.capture(model, x) == graph
    assert torch.equal(qsync.unwrap(model)(x), expected + 1) and not is_replaced(model)
    qsync.wrap(model, "bf16", strict=True)
    assert torch.equal(model(x), planned) and model.forward is around
    model.forward = inner
    assert torch.equal(qsync.unwrap(model)(x), expected) and "forward" not in vars(model)


def test_replicas_for_data_parallel_are_refused_while_wrapped():
    model = qsync.wrap(MLP(), "int8", strict=True)
    with pytest.raises(UnsupportedError, match="use DistributedDataParallel"):
        model._replicate_for_data_parallel()
    assert isinstance(plain_copy(model)._replicate_for_data_parallel(), MLP)
    qsync.capture(model, build("mlp")[1])
    with pytest.raises(UnsupportedError, match="use DistributedDataParallel"):
        model._replicate_for_data_parallel()
    assert isinstance(qsync.unwrap(model)._replicate_for_data_parallel(), MLP)


def test_running_plain_puts_everything_back_whatever_happens():
    model, batch = build("mlp")
    expected, _ = step(model, batch)
    qsync.wrap(model, "int8", strict=True).compile(backend="eager")
    forward, compiled = model.forward, model._compiled_call_impl
    with pytest.raises(ValueError, match="inside"), running_plain(model):
        assert torch.equal(step(model, batch)[0], expected)
        raise ValueError("inside")
    assert model.forward is forward and model._compiled_call_impl is compiled
    assert not torch.equal(step(model, batch)[0], expected)


def test_a_plain_copy_is_plain_at_every_depth():
    model, batch = build("mlp")
    expected, _ = step(model, batch)
    qsync.wrap(model.fc1, "int8", strict=True)
    qsync.wrap(model, "int8", strict=True)
    assert torch.equal(step(plain_copy(model), batch)[0], expected)
    assert not torch.equal(step(model, batch)[0], expected)


def test_a_submodule_keeps_its_precision_inside_a_wrapped_model():
    model, batch = build("mlp")
    qsync.wrap(model.fc1, "bf16", strict=True)
    qsync.wrap(model, "int8", strict=True)
    step(model, batch)
    assert modes_of(model.fc1) == {"bf16"} and modes_of(model) == {"int8"}
    names = {op.name for part in program_of(model).lowered for op in part.graph.adjustable}
    assert "fc1" not in names and "fc2" in names


def test_a_copy_of_a_recomputing_model_recomputes_its_own_modules():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    recompute(model, ["1"])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[1].weight.zero_()
        copied[1].bias.fill_(3.0)
    assert (copied(torch.randn(2, 8)) == 3.0).all()
    recompute(copied, [])
    assert "forward" not in vars(copied[1]) and "forward" in vars(model[1])


def test_recomputation_keeps_the_forward_that_a_module_was_given():
    """As Accelerate's hooks and adapters give it, and qsync.wrap on a part."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    plain = model[1].forward
    model[1].forward = lambda value: 10 * plain(value)
    qsync.wrap(model[0], "bf16", strict=True)
    expected, own = model(x), model[1].forward
    for _ in range(2):
        recompute(model, ["0", "1"])
        assert torch.equal(model(x), expected)
    recompute(model, [])
    assert torch.equal(model(x), expected) and model[1].forward is own


def test_a_hook_on_an_inner_module_is_traced_in_when_it_comes_and_out_when_it_goes():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)
    qsync.wrap(model, "int8", strict=True)
    before = model(x)
    hook = model[1].register_forward_hook(lambda module, args, output: output + 10)
    torch.testing.assert_close(model(x), before + 10)
    hook.remove()
    assert torch.equal(model(x), before)

"""Accelerate's autocast around a planned model: the plan is found beneath it, and undone beneath it."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import qsync
from qsync.errors import MismatchError
from qsync.hybrid_training import job_plan
from qsync.runtime.wrapping import plan_of
from qsync.tracing.replaced_forward import is_replaced

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True, mixed_precision="bf16")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def prepared(accelerator):
    return accelerator.prepare(qsync.wrap(network(), "int8", base="bf16", strict=True))


def test_unwrapped_it_runs_in_autocast_as_without_qsync(accelerator):
    model, expected = prepared(accelerator), accelerator.prepare(network())(X)
    planned, handle = model(X), model.forward
    assert is_replaced(model) and not torch.equal(planned, expected)
    assert torch.equal(qsync.unwrap(model)(X), expected) and torch.equal(handle(X), expected)
    assert not is_replaced(model) and model.forward == handle
    with pytest.raises(MismatchError, match="is not wrapped"):
        qsync.unwrap(model)
    qsync.wrap(model, "int8", base="bf16", strict=True)
    assert torch.equal(model(X), planned)
    assert torch.equal(qsync.unwrap(model)(X), expected)


def test_unwrapped_of_autocast_it_runs_under_its_plan(accelerator):
    model = prepared(accelerator)
    planned = model(X)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(bare(X), planned) and is_replaced(bare)
    assert torch.equal(qsync.unwrap(bare)(X), network()(X))


def test_a_copy_runs_its_own_weights(accelerator):
    model = prepared(accelerator)
    planned, copied = model(X), copy.deepcopy(model)
    assert torch.equal(copied(X), planned) and is_replaced(copied)
    nn.init.zeros_(copied[2].weight)
    assert torch.equal(copied(X), copied[2].bias.expand(8, 4).float()) and torch.equal(model(X), planned)
    assert list(inspect.signature(copied.forward).parameters) == ["input"]


def test_what_is_saved_has_its_plan(accelerator, monkeypatch, tmp_path):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.2")
    monkeypatch.setattr(job_plan, "cache_folder", lambda chosen: tmp_path / "cache")
    model = qsync.hybrid(network(), X, lambda m, x: m(x).square().mean(), precisions=["fp32", "bf16"])
    plan = plan_of(model)
    assert plan is not None and plan_of(accelerator.prepare(model)) is plan
    qsync.save(tmp_path / "saved", model)
    assert qsync.load(tmp_path / "saved", model).plan == plan

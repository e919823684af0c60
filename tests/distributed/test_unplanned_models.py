"""Where DDP trains, hybrid trains: what cannot be planned, and callers that left gradients off."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from two_ranks import launch, said

import qsync
from qsync.errors import CalibrationError, FormatError
from qsync.hybrid_training import job_plan


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.1")
    monkeypatch.setattr(job_plan, "cache_folder", lambda chosen: tmp_path)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


class Scaled(nn.Module):
    """A model without any product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


class Graph(nn.Module):
    """A convolution on a graph, whose neighbours are a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, batch):
        return torch.sparse.mm(batch[1], self.layer(batch[0]))


def loss_fn(model, x):
    return model(x).square().mean()


def planned(model, x, loss_fn=loss_fn):
    return qsync.hybrid(model, x, loss_fn, base="fp32", precisions=["fp32"])


TWO_RANKS = """
import warnings
model = qsync.hybrid(make().double(), (batch()[0].double(), batch()[1]), loss_fn, cache_dir=cache)
say(f"kind: {type(model).__name__}")
loss_fn(model, (batch(seed=rank)[0].double(), batch()[1])).backward()
total = sum(p.grad.sum() for p in model.parameters())
both = [torch.zeros_like(total) for _ in range(2)]
dist.all_gather(both, total)
say(f"gradients: {bool(both[0] == both[1])}")
"""


@pytest.mark.dist
def test_in_a_job_it_comes_back_in_ddp(tmp_path):
    output = launch(tmp_path, TWO_RANKS)
    assert said(output, "kind") == ["HybridDDP"] * 2 and said(output, "gradients") == ["True"] * 2


UNPLANNED = {
    "FP64": (lambda: network().double(), torch.randn(8, 16).double(), loss_fn, "0 stays as it is .* fp64"),
    "no gradient": (network, torch.randn(8, 16), lambda m, x: (m(x) * 0).mean(), "zero everywhere, from 2"),
    "no product": (Scaled, torch.randn(8, 16), loss_fn, "none of the [0-9]+ operators"),
}


@pytest.mark.parametrize(("make", "x", "loss_fn", "why"), UNPLANNED.values(), ids=UNPLANNED)
def test_what_cannot_be_planned_comes_back_as_it_is(make, x, loss_fn, why, caplog):
    model = make()
    assert planned(model, x, loss_fn) is model
    (record,) = caplog.records
    assert record.getMessage().startswith("qsync: nothing is planned, and the model trains as it is: ")
    assert re.search(why, record.getMessage()) and "\n" not in record.getMessage()
    assert "qsync.wrap" not in record.getMessage()
    loss_fn(model, x).backward()
    assert next(model.parameters()).grad is not None


@pytest.mark.parametrize("layout", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_batch_with_a_sparse_matrix(layout):
    batch = torch.randn(8, 16), layout(torch.eye(8))
    model = planned(Graph(), batch)
    loss_fn(model, batch).backward()
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_gradients_that_a_caller_left_off(off):
    model = network()
    with off():
        x = torch.randn(8, 16)
        assert qsync.sensitivity(model, [x], loss_fn).omega
        assert planned(model, x) is model
        assert not torch.is_grad_enabled()
    loss_fn(model, torch.randn(8, 16)).backward()
    assert model[0].weight.grad is not None


def test_models_that_do_not_train_say_so_before_anything_is_traced(monkeypatch):
    monkeypatch.setattr("qsync.api.trace_step", lambda *_: pytest.fail("traced"))
    with pytest.raises(
        CalibrationError, match=r"no parameter of Sequential requires .* \(requires_grad_\(\)\)"
    ):
        planned(network().requires_grad_(False), torch.randn(8, 16))
    with pytest.raises(FormatError, match="call it on a batch once, before qsync.hybrid"):
        planned(nn.Sequential(nn.LazyLinear(8)), torch.randn(8, 16))


def test_a_model_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = network()
    with pytest.raises(CalibrationError, match="parameters of Sequential were made in inference mode"):
        qsync.sensitivity(model, [torch.randn(8, 16)], loss_fn)


def test_anomaly_mode_rests_while_planning():
    """Its warnings would be errors here, and what the derivatives save would not be counted."""
    x = torch.randn(8, 16)
    plain = qsync.capture(network(), x)
    with torch.autograd.set_detect_anomaly(True):
        assert qsync.capture(network(), x) == plain
        assert planned(network(), x)(x).shape == (8, 4)
        assert torch.is_anomaly_enabled()

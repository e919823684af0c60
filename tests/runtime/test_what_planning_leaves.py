"""Planning runs the user's loss many times, and leaves nothing of it behind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.errors import CalibrationError, FormatError, UnsupportedError
from qsync.hybrid_training import job_plan

X = torch.randn(8, 16)


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.2")
    monkeypatch.setattr(job_plan, "cache_folder", lambda chosen: tmp_path)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def planned(model, batch, loss_fn, **options):
    return qsync.hybrid(model, batch, loss_fn, base="fp32", precisions=["fp32"], **options)


@pytest.mark.parametrize("gradient", [None, torch.ones(4, 8)], ids=["none", "some"])
def test_gradients_of_a_loss_with_weights_of_its_own(gradient):
    model, head = network(), nn.Linear(8, 4)
    head.weight.grad = None if gradient is None else gradient.clone()
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    planned(model, (x, y), lambda m, batch: F.cross_entropy(head(m(batch[0])), batch[1]))
    assert head.bias.grad is None
    if gradient is None:
        assert head.weight.grad is None
    else:
        assert torch.equal(head.weight.grad, gradient)
    assert all(parameter.grad is None for parameter in model.parameters())


SIZES = [(24, 8), (8, 24), (8, 8)]


@pytest.mark.parametrize(("first", "second"), SIZES, ids=str)
def test_a_loss_that_calls_the_model_with_two_batch_sizes(first, second):
    one, other = torch.randn(first, 16), torch.randn(second, 16)
    model = planned(network(), (one, other), lambda m, b: m(b[0]).square().mean() + m(b[1]).mean())
    (model(one).square().mean() + model(other).mean()).backward()
    assert model[0].weight.grad is not None


@dataclass
class Pair:
    """A batch of a type that torch does not look into."""

    x: torch.Tensor
    y: torch.Tensor


def test_a_batch_that_only_the_loss_can_read():
    batch = Pair(torch.randn(8, 16), torch.randint(0, 8, (8,)))
    model = planned(network(), batch, lambda m, b: F.cross_entropy(m(b.x), b.y))
    assert model(batch.x).shape == (8, 8)
    with pytest.raises(CalibrationError, match="holds no tensor"):
        qsync.profile(network(), batch, precisions=["fp32"], seconds=0.1)


def test_a_compiled_model_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("qsync.api.trace_step", lambda *_, **__: pytest.fail("traced"))
    with pytest.raises(FormatError, match="the model is compiled; give the plain one"):
        planned(torch.compile(network(), backend="eager"), torch.randn(8, 16), lambda m, b: m(b).mean())


def test_a_plan_that_finds_no_room_is_trained_by_and_no_half_of_it_is_kept(tmp_path, caplog):
    """A folder stands where one of its files is to go: as on a full disk, the others can be written."""

    def train():
        batch, page = torch.randn(8, 16), tmp_path / "page.html"
        model = planned(network(), batch, lambda m, b: m(b).mean(), report=page)
        model(batch).mean().backward()
        assert model[0].weight.grad is not None

    train()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not caplog.text
    (folder / "plan.json").write_text("{")  # so that it is planned again
    (folder / "sensitivity.json").unlink()
    (folder / "sensitivity.json").mkdir()
    train()
    assert caplog.text.count("the plan is not kept in") == 1 and "next start profiles again" in caplog.text
    assert caplog.text.count("the report is not written") == 1
    assert not (folder / "plan.json").exists()


class Stateful(nn.Module):
    """A recurrence that goes on from the state of the call before."""

    def __init__(self):
        super().__init__()
        self.recurrence, self.state = nn.LSTM(16, 8, batch_first=True), None

    def forward(self, x):
        state = self.state and tuple(each.detach() for each in self.state)
        y, self.state = self.recurrence(x, state)
        return y


def test_state_that_a_model_keeps_between_calls_is_there_when_it_is_planned():
    x, model = torch.randn(2, 3, 16), Stateful()
    assert planned(model, x, lambda model, x: model(x).square().mean()).state is None
    for _ in range(3):
        model(x).square().mean().backward()
    assert sorted(qsync.capture(Stateful(), x).batch_shapes) == [(1, 2, 8), (1, 2, 8), (2, 3, 16)]


class Factor(IntEnum):
    TWO = 2


class Multiplied(nn.Linear):
    """A layer whose code names a class of the user's, and an enumeration."""

    calls = 0

    def forward(self, x):
        Multiplied.calls += 1
        return super().forward(x) * Factor.TWO


def test_classes_of_the_users_are_as_they_were():
    assert qsync.sensitivity(Multiplied(16, 4), [X], lambda model, x: model(x).square().mean()).omega
    assert Multiplied.calls == 0


class Growing(Stateful):
    """A model that remembers all that it was given."""

    def forward(self, x):
        self.state = x if self.state is None else torch.cat([self.state, x], 1)
        return self.recurrence(self.state)[0]


def test_state_that_grows_from_call_to_call_is_to_be_reset():
    x = torch.randn(2, 3, 16)
    with pytest.raises(UnsupportedError, match="other tensors in a later call .* let loss_fn reset that"):
        planned(Growing(), x, lambda model, x: model(x).square().mean())

    def loss_fn(model, x):
        model.state = None
        return model(x).square().mean()

    assert planned(Growing(), x, loss_fn)(x).shape == (2, 3, 8)

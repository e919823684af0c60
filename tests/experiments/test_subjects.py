"""The models that predictions are judged on: they train, on data of seed, step and rank alone."""

from __future__ import annotations

import pytest
import torch

import qsync
from qsync.errors import QSyncError
from qsync.experiments.workloads.subjects import NAMES, subject


@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_every_parameter_a_gradient(name: str) -> None:
    chosen = subject(name, batch_size=2)
    model = chosen.make_model(0)
    inputs, targets = chosen.batch(0, 0, 0)
    loss = chosen.loss_fn(model(inputs), targets)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert qsync.capture(model, (inputs,)).adjustable


@pytest.mark.parametrize("name", ["bert", "vgg"])
def test_batches_repeat_by_seed_step_and_rank_and_differ_otherwise(name: str) -> None:
    chosen = subject(name, batch_size=4)
    first, again, other = chosen.batch(1, 2, 0), subject(name, 4).batch(1, 2, 0), chosen.batch(1, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert len(chosen.heldout(3)) == 3


def test_bert_is_scored_on_masked_bytes_only() -> None:
    inputs, targets = subject("bert", batch_size=8).batch(0, 0, 0)
    masked = targets >= 0
    assert 0.1 < masked.float().mean() < 0.25
    assert (inputs[masked] == 0).all() and (inputs[~masked] != 0).all()


def test_an_unknown_model_is_one_sentence() -> None:
    with pytest.raises(QSyncError, match="choose from gpt, bert"):
        subject("lstm")

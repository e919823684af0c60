"""Gradients from before a parameter was resized, as `resize_token_embeddings` leaves them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qsync
from qsync.tracing.held_state import undisturbed


def resized(model):
    weight = model[0].weight
    weight.data = torch.cat([weight.data, weight.data[:2]])
    model[0].num_embeddings += 2


def test_a_wrapped_model_trains_on():
    model, tokens = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)), torch.arange(8)
    qsync.wrap(model, "fp32")
    model(tokens).mean().backward()
    resized(model)
    with pytest.warns(UserWarning, match="before a parameter was resized .* are dropped"):
        loss = model(tokens + 4).mean()
    loss.backward()
    assert model[0].weight.grad.shape == (12, 8)
    model(tokens).mean().backward()


def test_planning_drops_them():
    model, tokens = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)), torch.arange(8)
    model(tokens).mean().backward()
    resized(model)
    with undisturbed(model):
        model(tokens).mean().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None

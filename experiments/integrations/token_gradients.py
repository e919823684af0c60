"""Gradients of losses by tokens on two ranks, against those of one process that has all tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import qsync
from qsync.distributed.agreement import agree
from qsync.experiments.harness.ranks import Place
from qsync.experiments.integrations.cases import net, parts_of

_SEQUENCES, _LENGTH, _VOCABULARY = 24, 16, 13


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(_VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, _VOCABULARY)
    ).double()


def _loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def measure(config: dict[str, Any], place: Place) -> float:
    """Return the largest relative error of a gradient in FP64 over several steps."""
    generator = torch.Generator().manual_seed(config["seed"])
    largest = 0.0
    for _ in range(config["steps"]):
        share = int(torch.randint(2, _SEQUENCES - 2, (1,), generator=generator))
        passes = torch.randint(1, 3, (2,), generator=generator).tolist()[dist.get_rank()]
        x = torch.randint(0, _VOCABULARY, (_SEQUENCES, _LENGTH), generator=generator)
        lengths = torch.randint(1, _LENGTH + 1, (_SEQUENCES, 1), generator=generator)
        y = torch.where(torch.arange(_LENGTH) < lengths, x.flip(1), -100)
        whole, model = net(_model), nn.parallel.DistributedDataParallel(net(_model))
        _loss(whole, x, y).backward()
        own = slice(0, share) if dist.get_rank() == 0 else slice(share, _SEQUENCES)
        for xs, ys in parts_of(model, (x[own], y[own]), passes):
            loss: Any = qsync.token_mean(model, _loss(model, xs, ys), (ys != -100).sum())
            loss.backward()
        error = max(map(_relative_error, model.parameters(), whole.parameters()))
        largest = max([largest, *agree("comparing gradients", partial(float, error))])
    return largest


def _relative_error(one: Any, other: Any) -> float:
    return float((one.grad - other.grad).abs().max() / other.grad.abs().max())

"""Sensitivity of a model whose blocks are recomputed around what is traced, with frozen weights inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import qsync


def net(wrapped: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    blocks[0][0].requires_grad_(False)  # as LoRA's base weights are
    return nn.Sequential(
        *(checkpoint_wrapper(block) if wrapped else block for block in blocks), nn.Linear(8, 2)
    )


def test_it_is_that_of_the_model_without_recomputation():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    found, expected = (
        qsync.sensitivity(net(wrapped), [(x,)], lambda m, b: m(b[0]).square().mean())
        for wrapped in (True, False)
    )
    assert len(found.omega) == len(expected.omega) == 5
    for one, other in zip(found.omega.values(), expected.omega.values(), strict=True):
        assert list(one.values()) == pytest.approx(
            list(other.values()), rel=0.3
        )  # of small values the difference is rounding

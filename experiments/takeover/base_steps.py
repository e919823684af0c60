"""Training in the base bf16 on one device, beside torch.autocast: the time of steps, and the loss reached."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import qsync
from qsync.experiments.harness.intervals import half_width
from qsync.experiments.harness.pairing import measure, quartiles, ratios
from qsync.experiments.harness.peers import under_autocast
from qsync.experiments.workloads.subjects import subject
from qsync.experiments.workloads.workload import Workload, make_optimizer

CPU = torch.device("cpu")
Loss = Callable[..., torch.Tensor]


def _plain(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
    return model, loss


def _autocast(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
    return model, under_autocast(loss, CPU)


def _base(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
    """Return what a user of qsync who keeps the autocast of the loop runs."""
    return qsync.wrap(model, base="bf16"), under_autocast(loss, CPU)


# The ways to train: each returns the model to train, and how its loss is called.
WAYS = {"fp32": _plain, "autocast": _autocast, "base bf16": _base}


def step_ratios(name: str, rounds: int) -> dict[str, Any]:
    """Time steps of a subject in turns: how many times as long autocast and FP32 take as the base."""
    workload = subject(name)
    model = workload.make_model(0)
    found = measure({way: _step(workload, copy.deepcopy(model), way) for way in WAYS}, rounds, CPU)
    return {
        "model": name,
        "seconds": {way: samples.median_s for way, samples in found.items()},
        **{way: quartiles(ratios(found[way], found["base bf16"])) for way in ("fp32", "autocast")},
    }


def _step(workload: Workload, model: nn.Module, way: str, seed: int = 0) -> Callable[[], float]:
    """Return one training step: the next batch, forward, backward, optimizer. It returns the loss."""
    trained, loss_of = WAYS[way](model, workload.loss)
    optimizer, batches = make_optimizer(workload.lr)(trained.parameters()), iter(range(10**9))

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(trained, workload.batch(seed, next(batches), 0))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def final_losses(name: str, seed: int, steps: int) -> dict[str, float]:
    """Train a subject in every way, from the same weights on the same batches.

    Returns the mean loss of the last ten steps.
    """
    workload = subject(name)
    found = {}
    for way in WAYS:
        torch.manual_seed(seed)
        step = _step(workload, workload.make_model(seed), way, seed)
        found[way] = statistics.fmean([step() for _ in range(steps)][-10:])
    return found


def loss_difference(losses: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean difference of the base's loss from autocast's, and its noise over seeds.

    The noise is the half width of the difference's 95 % confidence interval (Student's t).
    """
    differences = [found["base bf16"] - found["autocast"] for found in losses]
    return {"mean": statistics.fmean(differences), "noise": half_width(differences)}

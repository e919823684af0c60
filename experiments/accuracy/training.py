"""Train both ranks of a job in one process, with equal results.

Gradients are weighted by samples, like a mean over the global batch. Buffers (running statistics) are the
first rank's, as DDP broadcasts them. The learning rate warms up and follows a cosine to zero, so that a run
ends converged. Losses are evaluated in FP32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync import Precision
from qsync.experiments.accuracy.tasks import task_named
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.ranks import FAST
from qsync.experiments.workloads.workload import Workload, evaluate, make_optimizer
from qsync.runtime import choosers, planned_forward

_HELDOUT_BATCHES, _WARM_UP = 24, 0.05


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training run: a task, a method (a `Method` as JSON), a seed, and the number of steps."""

    task: str
    method: Mapping[str, Any]
    seed: int
    steps: int


def trained(run: TrainingRun) -> dict[str, Any]:
    """Run the training in this process; return held-out loss and accuracy."""
    torch.set_num_threads(1)
    torch._dynamo.reset()  # another number of samples would make sizes symbolic
    keep_freed_memory()
    workload = task_named(run.task).workload()
    ranks = BothRanks(workload.make_model(run.seed), run.method)
    optimizer = make_optimizer(workload.lr)(ranks.model.parameters())
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, run.steps))
    for step in range(run.steps):
        ranks.step(workload, run.seed, step)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    with _random_of((0,)):
        final_loss = evaluate(ranks.model, workload, num_batches=_HELDOUT_BATCHES)
    return {
        "steps": run.steps, "final_loss": final_loss, "final_accuracy": _accuracy(ranks.model, workload)
    }  # fmt: skip


class BothRanks:
    """Two model copies that share parameters, each under its rank's precisions."""

    def __init__(self, model: nn.Module, method: Mapping[str, Any]) -> None:
        self.model, self._samples = model, list(method["samples"].values())
        self._ranks = []
        for name in method["samples"]:
            shared: dict[int, Any] = {id(p): p for p in model.parameters()}
            shared |= {id(b): b for b in model.buffers() if name == FAST}
            rank = copy.deepcopy(model, shared)
            chosen = {op: Precision(p) for op, p in method["assignments"][name].items()}
            planned_forward.attach(rank, choosers.following(chosen))
            self._ranks.append(rank)

    def step(self, workload: Workload, seed: int, step: int) -> None:
        """Accumulate both ranks' gradients of a step; every method sees the same samples."""
        both = [workload.batch(seed, step, rank) for rank in range(len(self._samples))]
        parts = [torch.cat(part).split(self._samples) for part in zip(*both, strict=True)]  # type: ignore[no-untyped-call]
        for rank, (called, batch) in enumerate(zip(self._ranks, zip(*parts, strict=True), strict=True)):
            if len(batch[0]):
                with _random_of((seed, step, rank)):
                    loss = workload.loss(called, batch) * (len(batch[0]) / sum(self._samples))
                    loss.backward()


def _rate(step: int, steps: int) -> float:
    begun = min(1.0, (step + 1) / max(_WARM_UP * steps, 1.0))
    return begun * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def _accuracy(model: nn.Module, workload: Workload) -> float | None:
    """Return the share of correct held-out predictions; None without classes."""
    model.eval()
    found = total = 0
    with torch.no_grad():
        for inputs, targets in workload.heldout(_HELDOUT_BATCHES):
            if targets.is_floating_point():
                return None
            found += int((model(inputs).argmax(-1) == targets).sum())
            total += targets.numel()
    model.train()
    return found / total


@contextmanager
def _random_of(key: tuple[int, ...]) -> Iterator[None]:
    """Seed the random numbers inside the context by a key, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash(key) % 2**63)
        yield

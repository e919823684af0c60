"""A workload: a model, its data and its loss, and training it.

Batches depend only on (seed, step, rank), so that compared runs see the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from qsync.experiments.workloads.resnet import load_digits
from qsync.experiments.workloads.text import load_text, windows

Batch = tuple[torch.Tensor, torch.Tensor]  # (inputs, targets)
# Transforms text inputs and targets: a function of (inputs, targets, batch key).
Prepare = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], Batch]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its data and its loss.

    `make_model(seed)` has the same parameters on every rank. `batch(seed, step, rank)` is (inputs, targets);
    the model is called as `model(inputs)`, and `loss_fn(outputs, targets)` is a scalar, a mean over the
    batch. `heldout(num)` is the first `num` held-out batches, always the same. `lr` is for AdamW.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor]
    heldout: Callable[[int], list[Batch]]
    steps: int
    lr: float
    description: str

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the model's loss on a batch, in the form that `qsync.profile` expects."""
        outputs = model(batch[0])
        return self.loss_fn(getattr(outputs, "logits", outputs), batch[1])


def evaluate(
    model: nn.Module, workload: Workload, device: str | torch.device = "cpu", num_batches: int = 16
) -> float:
    """Return the mean loss over the first held-out batches in eval mode; restore the model's mode."""
    was_training = model.training
    model.eval()
    total, num_targets = 0.0, 0
    try:
        with torch.no_grad():
            for inputs, targets in workload.heldout(num_batches):
                loss = workload.loss_fn(model(inputs.to(device)), targets.to(device))
                total += float(loss) * targets.numel()
                num_targets += targets.numel()
    finally:
        model.train(was_training)
    return total / num_targets


def train(model: nn.Module, workload: Workload, seed: int, steps: Iterable[int]) -> None:
    """Run AdamW steps on rank 0's batches with the model as it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)
    for step in steps:
        optimizer.zero_grad()
        workload.loss(model, workload.batch(seed, step, 0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def make_optimizer(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a factory of the demo's optimizer from parameters; profiling times the same one."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module from this seed without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def text_workload(
    name: str,
    make: Callable[[], nn.Module],
    batch_size: int,
    context: int,
    description: str,
    *,
    data: str | Path | None = None,
    prepare: Prepare = lambda inputs, targets, key: (inputs, targets),
) -> Workload:
    """Return a workload of a byte model on text; `{source}` in its description is filled in."""
    text = load_text(data, context=context)

    def batch(seed: int, step: int, rank: int) -> Batch:
        # default_rng hashes the triple; seed + step + rank would give neighbours the same windows.
        draw = np.random.default_rng((seed, step, rank))
        starts = draw.integers(len(text.train) - context, size=batch_size)
        return prepare(*windows(text.train, starts, context), (seed, step, rank))

    def heldout(num: int) -> list[Batch]:
        starts = np.linspace(0, len(text.heldout) - context - 1, num * batch_size).astype(int)
        # Interleaved, so that a few batches already span the whole held-out text.
        return [prepare(*windows(text.heldout, starts[i::num], context), (i,)) for i in range(num)]

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # ignores targets of -100

    return Workload(
        name, lambda seed: seeded(make, seed), batch, loss_fn, heldout, 32, 1e-3,
        description.format(source=text.source),
    )  # fmt: skip


def digits_workload(name: str, make: Callable[[], nn.Module], batch_size: int, description: str) -> Workload:
    """Return a workload of an image model on scikit-learn's digits."""
    digits = load_digits()

    def batch(seed: int, step: int, rank: int) -> Batch:
        draw = np.random.default_rng((seed, step, rank))
        rows = torch.from_numpy(draw.choice(len(digits.train_labels), batch_size, replace=False))
        return digits.train_images[rows], digits.train_labels[rows]

    def heldout(num: int) -> list[Batch]:
        return list(zip(digits.heldout_images.chunk(num), digits.heldout_labels.chunk(num), strict=True))

    return Workload(
        name, lambda seed: seeded(make, seed), batch, F.cross_entropy, heldout, 48, 1e-3, description
    )  # fmt: skip

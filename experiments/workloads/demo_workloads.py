"""What the demo and the experiments train: a byte-level GPT on source text, a ResNet with BatchNorm on
digits.

Batches are functions of (seed, step, rank) and of nothing else, so that runs which must see the same data do,
whatever else they do differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from qsync.errors import QSyncError
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet, load_digits
from qsync.experiments.workloads.text import load_text, windows

Batch = tuple[torch.Tensor, torch.Tensor]  # (inputs, targets)

CONTEXT = 256
NAMES = ("gpt", "resnet")


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
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    heldout: Callable[[int], list[Batch]]
    steps: int
    lr: float
    description: str


def load(name: str, data: str | Path | None = None) -> Workload:
    """The workload called `name`, with its data read.

    `data` is a file or folder of text in place of the standard library's source; only the gpt takes it.
    Raises QSyncError for an unknown name, for `data` that cannot be used, and for `data` given to the resnet.

    >>> workload = load("gpt")
    >>> inputs, targets = workload.batch(seed=0, step=0, rank=1)
    >>> loss = workload.loss_fn(workload.make_model(0)(inputs), targets)
    """
    if name == "gpt":
        return _gpt(data)
    if name == "resnet":
        if data is not None:
            raise QSyncError(
                "the resnet workload trains on scikit-learn's digits; leave out --data, or choose gpt"
            )
        return _resnet()
    raise QSyncError(f"there is no workload {name!r}; choose one of {', '.join(NAMES)}")


def evaluate(
    model: nn.Module, workload: Workload, device: str | torch.device = "cpu", num_batches: int = 16
) -> float:
    """Mean loss over the first `num_batches` held-out batches, in eval mode. The model's mode is put back.

    >>> evaluate(model, workload)
    5.55
    """
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


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module that `make` builds from this seed; the caller's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _gpt(data: str | Path | None, batch_size: int = 4) -> Workload:
    text = load_text(data, context=CONTEXT)

    def batch(seed: int, step: int, rank: int) -> Batch:
        # default_rng hashes the triple; seed + step + rank would give neighbours the same windows.
        starts = np.random.default_rng((seed, step, rank)).integers(
            len(text.train) - CONTEXT, size=batch_size
        )
        return windows(text.train, starts, CONTEXT)

    def heldout(num: int) -> list[Batch]:
        starts = np.linspace(0, len(text.heldout) - CONTEXT - 1, num * batch_size).astype(int)
        # Dealt out in turn, so that a few batches already span the whole held-out text.
        return [windows(text.heldout, starts[i::num], CONTEXT) for i in range(num)]

    return Workload(
        name="gpt",
        make_model=lambda seed: seeded(lambda: Gpt(context=CONTEXT), seed),
        batch=batch,
        loss_fn=_next_token_loss,
        heldout=heldout,
        steps=32,
        lr=1e-3,
        description=f"byte-level GPT, 10.9 M parameters, {batch_size} x {CONTEXT} tokens per rank; "
        f"text: {text.source}",
    )


def _next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _resnet(batch_size: int = 96) -> Workload:
    digits = load_digits()

    def batch(seed: int, step: int, rank: int) -> Batch:
        chosen = np.random.default_rng((seed, step, rank)).choice(
            len(digits.train_labels), batch_size, replace=False
        )
        rows = torch.from_numpy(chosen)
        return digits.train_images[rows], digits.train_labels[rows]

    def heldout(num: int) -> list[Batch]:
        parts = zip(digits.heldout_images.chunk(num), digits.heldout_labels.chunk(num), strict=True)
        return list(parts)

    return Workload(
        name="resnet",
        make_model=lambda seed: seeded(ResNet, seed),
        batch=batch,
        loss_fn=F.cross_entropy,
        heldout=heldout,
        steps=48,
        lr=1e-3,
        description=f"ResNet with BatchNorm, 2.8 M parameters, {batch_size} images per rank; "
        "scikit-learn's digits, 16 x 16",
    )

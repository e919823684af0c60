"""The models that predictions are judged on: GPT, BERT, ViT, ResNet and VGG with BatchNorm, on real data.

Small, so that hundreds of steps fit into minutes on one core, and real in structure: residual streams, norms
of batches and of layers, attention with and without a mask, strided convolutions, pooling. Text is the source
of Python's standard library, images are scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from qsync.errors import QSyncError
from qsync.experiments.workloads.bert import NOT_SCORED, Bert, masked
from qsync.experiments.workloads.demo_workloads import Batch, Workload, seeded
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet, load_digits
from qsync.experiments.workloads.text import load_text, windows
from qsync.experiments.workloads.vgg import Vgg
from qsync.experiments.workloads.vit import Vit

NAMES = ("gpt", "bert", "vit", "resnet", "vgg")
CONTEXT = 128


def subject(name: str, batch_size: int | None = None) -> Workload:
    """The model called `name` with its data and loss, as a workload. Raises QSyncError for an unknown name.

    >>> chosen = subject("bert")
    >>> inputs, targets = chosen.batch(seed=0, step=0, rank=0)
    >>> chosen.loss_fn(chosen.make_model(0)(inputs), targets)
    """
    if name == "gpt":
        return _text(
            name, lambda: Gpt(num_layers=4, width=256, num_heads=4, context=CONTEXT), batch_size or 8
        )
    if name == "bert":
        return _text(name, lambda: Bert(context=CONTEXT), batch_size or 8)
    if name == "vit":
        return _images(name, Vit, batch_size or 16)
    if name == "resnet":
        return _images(name, lambda: ResNet(channels=(32, 64, 128)), batch_size or 64)
    if name == "vgg":
        return _images(name, Vgg, batch_size or 32)
    raise QSyncError(f"there is no model {name!r}; choose from {', '.join(NAMES)}")


def _text(name: str, make: Callable[[], nn.Module], batch_size: int) -> Workload:
    text = load_text(None, context=CONTEXT)

    def rows(of: np.ndarray, starts: np.ndarray, key: tuple[int, ...]) -> Batch:
        inputs, targets = windows(of, starts, CONTEXT)
        return (inputs, targets) if name == "gpt" else masked(inputs, key)

    def batch(seed: int, step: int, rank: int) -> Batch:
        draw = np.random.default_rng((seed, step, rank))
        return rows(text.train, draw.integers(len(text.train) - CONTEXT, size=batch_size), (seed, step, rank))

    def heldout(num: int) -> list[Batch]:
        starts = np.linspace(0, len(text.heldout) - CONTEXT - 1, num * batch_size).astype(int)
        return [rows(text.heldout, starts[i::num], (i,)) for i in range(num)]

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED)

    return Workload(
        name=name,
        make_model=lambda seed: seeded(make, seed),
        batch=batch,
        loss_fn=loss_fn,
        heldout=heldout,
        steps=32,
        lr=1e-3,
        description=f"byte-level {name.upper()}, {batch_size} x {CONTEXT} tokens; text: {text.source}",
    )


def _images(name: str, make: Callable[[], nn.Module], batch_size: int) -> Workload:
    digits = load_digits()

    def batch(seed: int, step: int, rank: int) -> Batch:
        draw = np.random.default_rng((seed, step, rank))
        chosen = torch.from_numpy(draw.choice(len(digits.train_labels), batch_size, replace=False))
        return digits.train_images[chosen], digits.train_labels[chosen]

    def heldout(num: int) -> list[Batch]:
        return list(zip(digits.heldout_images.chunk(num), digits.heldout_labels.chunk(num), strict=True))

    return Workload(
        name=name,
        make_model=lambda seed: seeded(make, seed),
        batch=batch,
        loss_fn=F.cross_entropy,
        heldout=heldout,
        steps=48,
        lr=1e-3,
        description=f"{name}, {batch_size} images of 16 x 16; scikit-learn's digits",
    )

"""The models of compare_growth.py: a byte-level GPT on source text, a ViT on digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from qsync import QSyncError
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.subjects import CONTEXT, subject
from qsync.experiments.workloads.vit import Vit
from qsync.experiments.workloads.workload import Batch, Workload, seeded

# Streams of batches: the large model never sees the source's batches again.
SOURCE, LARGE = 0, 1
PATCH = 4  # pixels; 16 patches and a class token
SHIFT = 2  # largest shift of a training image in pixels, as augmentation against memorizing 1500 images


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model. Default heads are 32 wide, and copied whole."""

    width: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A pair of models: `small`, the source, trains `source_steps`; `large` trains `steps` from scratch.

    `lr` and `source_lr` are AdamW's maxima, each tuned for its own from-scratch run. `batch` is samples per
    step: sequences of 128 tokens, or images.
    """

    workload: str
    small: Sizes
    large: Sizes
    batch: int
    steps: int
    source_steps: int
    lr: float
    source_lr: float
    heldout: int  # held-out batches: `batch` samples each for text, all images otherwise
    evaluations: int = 20  # evaluations of a from-scratch run, at equal distances

    @property
    def items(self) -> int:
        """Return the tokens or images of a step."""
        return self.batch * (CONTEXT if self.workload == "gpt" else 1)


SETTINGS = {
    "gpt": Setting("gpt", Sizes(64, 2, 2), Sizes(96, 3, 3), 16, 600, 600, 4e-3, 4e-3, 8),
    "vit": Setting("vit", Sizes(64, 3, 2), Sizes(96, 4, 3), 64, 400, 400, 2e-3, 2e-3, 1),
}


def setting(name: str) -> Setting:
    """Return the setting called `name`; QSyncError for an unknown one."""
    if name not in SETTINGS:
        raise QSyncError(f"unknown workload {name!r}; choose from {', '.join(SETTINGS)}")
    return SETTINGS[name]


def make(of: Setting, sizes: Sizes, seed: int) -> nn.Module:
    """Build a model of these sizes from this seed."""
    parts = (sizes.layers, sizes.width, sizes.heads)
    if of.workload == "gpt":
        return seeded(lambda: Gpt(*parts, context=CONTEXT), seed)
    return seeded(lambda: Vit(*parts, patch=PATCH), seed)


def workload_of(of: Setting) -> Workload:
    """Return a workload of data (`batch(seed, step, SOURCE or LARGE)`), loss, and the large model."""
    found = replace(subject(of.workload, of.batch), make_model=lambda seed: make(of, of.large, seed))
    return found if of.workload == "gpt" else replace(found, batch=_shifted(found.batch))


def _shifted(batch: Callable[[int, int, int], Batch]) -> Callable[[int, int, int], Batch]:
    """Shift each image by a few random pixels; fill with the background."""

    def moved(seed: int, step: int, stream: int) -> Batch:
        images, labels = batch(seed, step, stream)
        side = images.shape[-1]
        padded = nn.functional.pad(images, (SHIFT,) * 4, value=float(images.min()))
        corners = np.random.default_rng((seed, step, stream, 1)).integers(
            2 * SHIFT + 1, size=(len(images), 2)
        )
        rows = [
            image[:, top : top + side, left : left + side]
            for image, (top, left) in zip(padded, corners, strict=True)
        ]
        return torch.stack(rows), labels

    return moved

"""The start of a large model in compare_growth.py: from scratch, or from a trained small one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import qsync
from qsync.experiments.expansion.growth_subjects import Setting, make
from qsync.experiments.expansion.stacking import stacked

# "plan" is "expanded" trained on under a hybrid precision plan; "source" is the small model itself.
STARTS = ("source", "scratch", "expanded", "even", "stacked", "plan")


def begun(of: Setting, start: str, seed: int, folder: Path) -> nn.Module:
    """Return the model before its first step; `folder` has the sources."""
    if start == "source":
        return make(of, of.small, seed)
    if start == "scratch":
        return make(of, of.large, seed)
    source = source_of(of, seed, folder)
    if start == "stacked":
        return stacked(source, make(of, of.large, seed))
    return grown(of, source, "even" if start == "even" else "random", seed)


def grown(of: Setting, source: nn.Module, split: str, seed: int) -> nn.Module:
    """Expand the source to the large model's sizes."""
    to = {"width": of.large.width, "layers": of.large.layers, "heads": of.large.heads}
    large: nn.Module = qsync.expand(source, qsync.recipe_of(source).to(**to), split=split, seed=seed)
    return large


def source_path(folder: Path, of: Setting, seed: int) -> Path:
    """Return where the weights of a source are."""
    return folder / f"source-{of.workload}-{seed}.pt"


def source_of(of: Setting, seed: int, folder: Path) -> nn.Module:
    """Return the trained source, as its own run left it."""
    model = make(of, of.small, seed)
    model.load_state_dict(torch.load(source_path(folder, of, seed), weights_only=True))
    return model

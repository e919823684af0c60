"""The training runs of compare_growth.py: starts of a large model, and held-out curves.

A large model starts from scratch, or from a trained small one. All large models of a workload and seed see
the same batches in the same order; the source has its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync
from qsync.experiments.expansion.growth_subjects import LARGE, SOURCE, Setting, make, workload_of
from qsync.experiments.workloads.workload import Workload, evaluate

WARM_UP, FLOOR = 0.05, 0.02  # fraction of the from-scratch steps; fraction of the maximum learning rate
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
STARTS = ("source", "scratch", "expanded")  # "source" is the small model itself


@dataclass(frozen=True, slots=True)
class Method:
    """The start of a large model (see `STARTS`), and its fraction of from-scratch steps."""

    start: str
    ratio: float = 1.0

    @property
    def name(self) -> str:
        """Return the method's start with its fraction."""
        return self.start if self.ratio == 1.0 else f"{self.start} {self.ratio:g}"


def begun(of: Setting, start: str, seed: int, folder: Path) -> nn.Module:
    """Return the model before its first step; `folder` has the sources."""
    if start == "source":
        return make(of, of.small, seed)
    if start == "scratch":
        return make(of, of.large, seed)
    source = source_of(of, seed, folder)
    to = {"width": of.large.width, "layers": of.large.layers, "heads": of.large.heads}
    large: nn.Module = qsync.expand(source, qsync.recipe_of(source).to(**to), seed=seed)
    return large


def source_path(folder: Path, of: Setting, seed: int) -> Path:
    """Return the path of a source's weights."""
    return folder / f"source-{of.workload}-{seed}.pt"


def source_of(of: Setting, seed: int, folder: Path) -> nn.Module:
    """Return a trained source from its own run's weights."""
    model = make(of, of.small, seed)
    model.load_state_dict(torch.load(source_path(folder, of, seed), weights_only=True))
    return model


def run(of: Setting, method: Method, seed: int, folder: Path) -> dict[str, Any]:
    """Train by one method; return the measurements.

    `folder` holds the weights of sources, which their own runs write.
    """
    workload = workload_of(of)
    model = begun(of, method.start, seed, folder)
    trained = _train(of, workload, model, method, seed)
    if method.start == "source":
        torch.save(model.state_dict(), source_path(folder, of, seed))
    return {
        "setting": asdict(of), "method": method.name, **asdict(method), "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()), **trained,
    }  # fmt: skip


def _train(of: Setting, workload: Workload, model: nn.Module, method: Method, seed: int) -> dict[str, Any]:
    """Run the method's steps; return the held-out losses in between."""
    is_source = method.start == "source"
    scratch_steps = of.source_steps if is_source else of.steps
    lr, stream = (of.source_lr, SOURCE) if is_source else (of.lr, LARGE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = qsync.ExpandedSchedule(
        optimizer, scratch_steps, warm_up=int(WARM_UP * scratch_steps), ratio=method.ratio, floor=FLOOR
    )
    every = max(1, scratch_steps // of.evaluations)
    curve = [{"step": 0, "items": 0, "heldout": _loss(model, workload, of)}]
    for step in range(schedule.total_steps):
        batch = workload.batch(seed, step, stream)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if done % every == 0 or done == schedule.total_steps:
            curve.append({"step": done, "items": done * of.items, "heldout": _loss(model, workload, of)})
    return {"steps": schedule.total_steps, "curve": curve}


def _loss(model: nn.Module, workload: Workload, of: Setting) -> float:
    return evaluate(model, workload, num_batches=of.heldout)

"""The runs of compare_growth.py: how a large model begins, and how it trains, with its held-out curve.

A large model begins from scratch, or from a trained small one. *Stacked* is plain growing, not lossless.
Depth as in progressive stacking (Gong et al. 2019): the copy of a block stands on top of the whole stack and
works from the first step on. Width by tiling: an axis starts over until it is long enough. So that a layer
that reads more copies answers no louder, its columns are scaled by how much longer they became; which copies
there are twice, and what norms make of them, is not looked at.

All large models of a workload and seed see the same batches in the same order; the source has its own. A
second is one of CPU time on one thread: a shared machine makes wall time longer, CPU time hardly.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync
from qsync.experiments.expansion.growth_subjects import LARGE, SOURCE, Setting, make, workload_of
from qsync.experiments.workloads.workload import Workload, evaluate

WARM_UP, FLOOR = 0.05, 0.02  # of the from-scratch steps, and of the maximum learning rate
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
STARTS = ("source", "scratch", "expanded", "stacked")  # "source" is the small model itself
BLOCK = re.compile(r"^blocks\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Method:
    """How a large model begins (see `STARTS`), and the share of the from-scratch steps that it trains."""

    start: str
    ratio: float = 1.0

    @property
    def name(self) -> str:
        """The method in a word, with its share."""
        return self.start if self.ratio == 1.0 else f"{self.start} {self.ratio:g}"


def begun(of: Setting, start: str, seed: int, folder: Path) -> nn.Module:
    """Return the model before its first step; `folder` has the sources."""
    if start == "source":
        return make(of, of.small, seed)
    if start == "scratch":
        return make(of, of.large, seed)
    source = source_of(of, seed, folder)
    if start == "stacked":
        return stacked(source, make(of, of.large, seed))
    to = {"width": of.large.width, "layers": of.large.layers, "heads": of.large.heads}
    large: nn.Module = qsync.expand(source, qsync.recipe_of(source).to(**to), seed=seed)
    return large


def source_path(folder: Path, of: Setting, seed: int) -> Path:
    """Return where the weights of a source are."""
    return folder / f"source-{of.workload}-{seed}.pt"


def source_of(of: Setting, seed: int, folder: Path) -> nn.Module:
    """Return the trained source, as its own run left it."""
    model = make(of, of.small, seed)
    model.load_state_dict(torch.load(source_path(folder, of, seed), weights_only=True))
    return model


def stacked(small: nn.Module, large: nn.Module) -> nn.Module:
    """Tile and stack the weights of `small` into `large`, a new model of its class; return `large`."""
    trained = small.state_dict()
    layers = len(small.blocks)  # type: ignore[arg-type]
    modules = dict(large.named_modules())
    with torch.no_grad():
        for name, value in large.state_dict().items():
            found = BLOCK.match(name)
            before = BLOCK.sub(f"blocks.{int(found[1]) % layers}.", name) if found else name
            source, module = trained[before], modules[name.rpartition(".")[0]]
            # Queries, keys and values are stacked in one axis, and start over each for itself.
            parts = 3 if ".qkv." in name else 1
            value.copy_(torch.cat([_tiled(part, value, parts) for part in source.chunk(parts)]))
            if isinstance(module, nn.Linear) and name.endswith("weight"):
                value *= source.shape[1] / value.shape[1]
    return large


def _tiled(source: torch.Tensor, value: torch.Tensor, parts: int) -> torch.Tensor:
    """`source`, each axis started over until it is as long as that of `value`, the first a part of it."""
    lengths = (value.shape[0] // parts, *value.shape[1:])
    for axis, length in enumerate(lengths):
        source = source.index_select(axis, torch.arange(length) % source.shape[axis])
    return source


def run(of: Setting, method: Method, seed: int, folder: Path) -> dict[str, Any]:
    """Train by one method; return what was measured.

    In `folder` the run finds the source that it begins with; a source's own run leaves its weights.
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
    """Take the method's steps; return the held-out losses in between."""
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
    seconds: list[float] = []
    for step in range(schedule.total_steps):
        batch = workload.batch(seed, step, stream)
        begun_s = time.process_time()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - begun_s)
        done = step + 1
        if done % every == 0 or done == schedule.total_steps:
            curve.append({"step": done, "items": done * of.items, "heldout": _loss(model, workload, of)})
    return {"steps": schedule.total_steps, "step_cpu_s": statistics.median(seconds), "curve": curve}


def _loss(model: nn.Module, workload: Workload, of: Setting) -> float:
    return evaluate(model, workload, num_batches=of.heldout)

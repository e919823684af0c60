"""The runs of compare_growth.py: a model trained by one method, with its held-out curve.

All large models of a workload and seed see the same batches in the same order; the source has its own. A
second is one of CPU time on one thread: a shared machine makes wall time longer, CPU time hardly.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync
from qsync import Plan
from qsync.experiments.expansion.growth_subjects import LARGE, SOURCE, Setting, workload_of
from qsync.experiments.expansion.starts import begun, in_ranks, plan_path, source_path
from qsync.experiments.harness.emulated_profiles import HALF
from qsync.experiments.workloads.workload import Batch, Workload, evaluate

WARM_UP, FLOOR = 0.05, 0.02  # of the from-scratch steps, and of the maximum learning rate
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0


@dataclass(frozen=True, slots=True)
class Method:
    """How a large model begins (see `starts`), and the share of the from-scratch steps that it trains."""

    start: str
    ratio: float = 1.0

    @property
    def name(self) -> str:
        """The method in a word, with its share."""
        return self.start if self.ratio == 1.0 else f"{self.start} {self.ratio:g}"


def run(of: Setting, method: Method, seed: int, folder: Path) -> dict[str, Any]:
    """Train by one method; return what was measured.

    In `folder` the run finds the source that it begins with, and its plan; a source's own run leaves its
    weights.
    """
    workload = workload_of(of)
    model = begun(of, method.start, seed, folder)
    ranks: dict[str, nn.Module] = {"": model}
    more: dict[str, Any] = {}
    if method.start == "plan":
        plan = Plan.load(plan_path(folder, of))
        ranks = in_ranks(model, plan)
        weak = plan[HALF].assignment
        more["adjustable"] = len(weak)
        more["lowered"] = Counter(str(weak[op]) for op in plan[HALF].lowered)
        more["first_under_plan"] = {name: _loss(rank, workload, of) for name, rank in ranks.items()}
    trained = _train(of, workload, model, list(ranks.values()), method, seed)
    if method.start == "plan":
        more["final_under_plan"] = {name: _loss(rank, workload, of) for name, rank in ranks.items()}
    if method.start == "source":
        torch.save(model.state_dict(), source_path(folder, of, seed))
    return {
        "setting": asdict(of), "method": method.name, **asdict(method), "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()), **trained, **more,
    }  # fmt: skip


def _train(
    of: Setting, workload: Workload, model: nn.Module, ranks: Sequence[nn.Module], method: Method, seed: int
) -> dict[str, Any]:  # fmt: skip
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
        _gradients(workload, ranks, batch)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - begun_s)
        done = step + 1
        if done % every == 0 or done == schedule.total_steps:
            curve.append({"step": done, "items": done * of.items, "heldout": _loss(model, workload, of)})
    return {"steps": schedule.total_steps, "step_cpu_s": statistics.median(seconds), "curve": curve}


def _gradients(workload: Workload, ranks: Sequence[nn.Module], batch: Batch) -> None:
    """Compute the gradients of the mean over the batch, in equal shares by rank, as DDP would reduce them."""
    inputs, targets = (part.chunk(len(ranks)) for part in batch)
    for rank, own, wanted in zip(ranks, inputs, targets, strict=True):
        (workload.loss_fn(rank(own), wanted) / len(ranks)).backward()  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, workload: Workload, of: Setting) -> float:
    return evaluate(model, workload, num_batches=of.heldout)

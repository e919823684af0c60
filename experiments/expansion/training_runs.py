"""The runs of experiments/expansion/compare_growth.py: a model trained by one method, with its held-out curve.

All large models of a workload and seed see the same batches in the same order; the source has its own. A
second is one of CPU time on one thread: a shared machine makes wall time longer, CPU time hardly.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync
from qsync.backend.device_detection import machine
from qsync.errors import MismatchError
from qsync.experiments.allocation.bases import HALF
from qsync.experiments.demo.rank import commit
from qsync.experiments.expansion.growth_subjects import LARGE, SOURCE, Setting, workload_of
from qsync.experiments.expansion.hybrid_plans import in_ranks, plan_path
from qsync.experiments.expansion.starts import begun, source_path
from qsync.experiments.workloads.demo_workloads import Batch, Workload, evaluate
from qsync.records.json_files import read_json, write_json
from qsync.records.plans import Plan

WARM_UP, FLOOR = 0.05, 0.02  # of the from-scratch steps, and of the maximum learning rate
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0

Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Method:
    """How a large model begins (see `expansion_starts`), and for which share of the from-scratch steps it
    trains.
    """

    start: str
    ratio: float = 1.0

    @property
    def name(self) -> str:
        return self.start if self.ratio == 1.0 else f"{self.start} {self.ratio:g}"


def run_path(folder: Path, of: Setting, method: Method, seed: int) -> Path:
    """Where a finished run is kept."""
    return folder / f"{of.workload}-{seed}-{method.name.replace(' ', '-')}.json"


def kept(of: Setting, method: Method, seed: int, folder: Path) -> dict[str, Any] | None:
    """A run that is there already; None if it is not. MismatchError for one that was made otherwise."""
    path = run_path(folder, of, method, seed)
    if not path.exists():
        return None
    found = read_json(path)
    if found["setting"] != asdict(of):
        differ = [key for key, value in asdict(of).items() if found["setting"].get(key) != value]
        name = differ[0] if differ else "evaluations"
        raise MismatchError(
            f"{path} was run with {name} = {found['setting'].get(name)}, not {asdict(of).get(name)}; give "
            "another --out, or the options of that run"
        )
    return found


def run(
    of: Setting, method: Method, seed: int, folder: Path, progress: Progress = lambda step, loss: None
) -> dict[str, Any]:
    """Train by one method, keep what was measured in `folder`, and return it.

    There the run finds the source that it begins with, and its plan; a source's own run leaves its weights.
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
    trained = _train(of, workload, model, list(ranks.values()), method, seed, progress)
    if method.start == "plan":
        more["final_under_plan"] = {name: _loss(rank, workload, of) for name, rank in ranks.items()}
    if method.start == "source":
        torch.save(model.state_dict(), source_path(folder, of, seed))
    content = {
        "measured": "held-out losses; CPU seconds of training steps on one thread",
        "setting": asdict(of), "method": method.name, **asdict(method), "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()), **trained, **more,
        "machine": machine(), "qsync": qsync.__version__, "commit": commit(),
    }  # fmt: skip
    write_json(run_path(folder, of, method, seed), content)
    return content


def _train(
    of: Setting, workload: Workload, model: nn.Module, ranks: Sequence[nn.Module], method: Method, seed: int,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """The steps that the method has, and the held-out losses in between."""
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
        progress(done, float(curve[-1]["heldout"]))
    return {"steps": schedule.total_steps, "step_cpu_s": statistics.median(seconds), "curve": curve}


def _gradients(workload: Workload, ranks: Sequence[nn.Module], batch: Batch) -> None:
    """Those of the mean over the batch, of which every rank has an equal share: what DDP would reduce."""
    inputs, targets = (part.chunk(len(ranks)) for part in batch)
    for rank, own, wanted in zip(ranks, inputs, targets, strict=True):
        (workload.loss_fn(rank(own), wanted) / len(ranks)).backward()  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, workload: Workload, of: Setting) -> float:
    return evaluate(model, workload, num_batches=of.heldout)

"""What an asynchronous checkpoint every 20 steps costs on two ranks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import qsync
from qsync.distributed.agreement import agree
from qsync.experiments.harness.ranks import Place
from qsync.experiments.workloads.gpt import Gpt

_STEPS = 20  # from one checkpoint to the next
ARMS = ("none", "Checkpoints")


def measure(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train in rounds of 20 steps with one checkpoint each, or none, in turns; return their medians."""
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(Gpt(num_layers=4, width=256, num_heads=8, context=64, vocab=256))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (8, 64))
    folder = Path(config["folder"])
    checkpoints = qsync.Checkpoints(folder / "qsync", model, optimizer, every=1, keep=2)
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(config["rounds"] + 1):  # the first round warms up
        for arm in ARMS:
            checkpoints.finish()
            dist.barrier()
            start_s = time.perf_counter()
            for step in range(_STEPS):
                if step == 0 and arm == "Checkpoints":
                    checkpoints.step()
                optimizer.zero_grad()
                loss: Any = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
            if number:
                found[arm].append(time.perf_counter() - start_s)
    checkpoints.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "qsync")
    seconds = {arm: max(each) for arm, each in _medians(found).items()}
    return {
        "step_s": seconds["none"] / _STEPS,
        "stall": {arm: seconds[arm] / seconds["none"] - 1 for arm in ARMS[1:]},
    }


def _medians(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return by arm the median of every rank."""
    everyone: list[Any] = agree(
        "gathering rounds", lambda: {arm: median(each) for arm, each in found.items()}
    )
    return {arm: [one[arm] for one in everyone] for arm in ARMS}

"""Measure the cost of an asynchronous checkpoint every 20 steps on two ranks."""

from __future__ import annotations

import shutil
import time
from functools import partial
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

_STEPS = 20  # steps between checkpoints


def measure(config: dict[str, Any], place: Place) -> dict[str, float]:
    """Train rounds of 20 steps with and without a checkpoint, in turns; return the difference."""
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(Gpt(num_layers=4, width=256, num_heads=8, context=64, vocab=256))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (8, 64))
    folder = Path(config["folder"]) / "qsync"
    checkpoints = qsync.Checkpoints(folder, model, optimizer, every=1, keep=2)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(config["rounds"] + 1):  # the first round warms up
        for saves in seconds:
            checkpoints.finish()
            dist.barrier()
            start_s = time.perf_counter()
            if saves:
                checkpoints.step()
            for _ in range(_STEPS):
                optimizer.zero_grad()
                loss: Any = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
            if number:
                seconds[saves].append(time.perf_counter() - start_s)
    checkpoints.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    # the slower rank's seconds
    without, saving = (max(agree("gathering rounds", partial(median, seconds[saves]))) for saves in seconds)
    return {"step_s": without / _STEPS, "stall": saving / without - 1}

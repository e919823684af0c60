"""The same job under torchrun, which ends all ranks when one dies and restarts from the last checkpoint.

Under torchrun, `python -m qsync.experiments.elastic.restarts CONFIG` is one rank.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qsync.distributed.shares import SampleOrder
from qsync.errors import QSyncError
from qsync.experiments.elastic.card import NUM_SAMPLES, Log, Rows, Slowed, loss_of, model_of
from qsync.experiments.elastic.cluster import DEFAULTS

STEPS_PER_CHECKPOINT = 20
_RECOVERY_S = 240.0


def measure(folder: Path, num_events: int, seed: int, **settings: Any) -> dict[str, float]:
    """Kill a random rank so many times; return the seconds of a step, and those lost to an event, as medians.

    Lost is the time until the job is further than it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "config.json", folder / "steps.jsonl"
    path.write_text(json.dumps({**DEFAULTS, **settings, "folder": str(folder.absolute())}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
               "--max-restarts=100", "-m", "qsync.experiments.elastic.restarts",
               str(path)]  # fmt: skip
    draw, lost = random.Random(seed), []
    # Without the second variable ranks that restart at once find addresses of the dead in the agent's store.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = subprocess.Popen(command, env=environment)
    try:
        _wait(log, 100)
        for number in range(num_events):
            rank = draw.randrange(4)
            before, start = _last(log), time.monotonic()
            os.kill(int((folder / f"rank-{rank}.pid").read_text()), signal.SIGKILL)
            lost.append(_wait(log, before + 1, number) - start)
            _wait(log, before + 100 + draw.randrange(STEPS_PER_CHECKPOINT), number)
    finally:
        job.terminate()  # torchrun then ends its ranks
        job.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    step_s = median(b["at"] - a["at"] for a, b in pairwise(lines))
    return {"lost_s_per_event": median(lost), "step_s": step_s, "events": num_events}


def _last(log: Path) -> int:
    lines = log.read_text().splitlines() if log.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else -1


def _wait(log: Path, step: int, number: int = 0) -> float:
    until = time.monotonic() + _RECOVERY_S
    while _last(log) < step:
        if time.monotonic() > until:
            raise QSyncError(f"the job under torchrun did not reach step {step} after event {number}")
        time.sleep(0.05)
    return time.monotonic()


def main(config: dict[str, Any]) -> None:
    """Train as one rank, from the last checkpoint on."""
    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), int(os.environ["RANK"])
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    dtype = getattr(torch, config["dtype"])
    model = DistributedDataParallel(model_of(config["width"], dtype, seed=0))
    if rank % 2:
        model.register_forward_pre_hook(Slowed(config["weak_share"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    rows, order, log = Rows(dtype), SampleOrder(NUM_SAMPLES, 0), Log(folder / "steps.jsonl")
    size = config["batch_size"] // 4
    for step in range(begin, config["steps"]):
        optimizer.zero_grad()
        chosen = order.indices(step * config["batch_size"] + rank * size, size)
        loss_of(model, torch.utils.data.default_collate([rows[i] for i in chosen])).backward()
        optimizer.step()
        if rank == 0:
            if (step + 1) % STEPS_PER_CHECKPOINT == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
            log.write(step=step)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

"""Train the same job under torchrun: by `qsync.hybrid` under a plan, or in plain DDP with checkpoints.

Under torchrun, `python -m qsync.experiments.elastic.torchrun CONFIG` is one rank. torchrun ends all ranks
when one dies, and restarts them from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qsync
from qsync.backend.devices.emulation import slowed_otherwise
from qsync.distributed.shares import SampleOrder
from qsync.experiments.elastic.card import NUM_SAMPLES, Log, Rows, Slowed, digest_of, loss_of, model_of
from qsync.experiments.elastic.cluster import WEAK
from qsync.experiments.elastic.events import NAMES
from qsync.records.plans import Plan

STEPS_PER_CHECKPOINT = 20
RANKS = sorted(NAMES)  # in the order of ranks, as for cards


def start(folder: Path, config: dict[str, Any], *options: str) -> subprocess.Popen[bytes]:
    """Start four ranks with these torchrun options, logging to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "out": str(folder.absolute())}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
               *options, "-m", "qsync.experiments.elastic.torchrun", str(path)]  # fmt: skip
    # Without the second variable, restarted ranks find addresses of dead ranks in the agent's store.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, env=environment)


def main(config: dict[str, Any]) -> None:
    """Train as one rank, from the last checkpoint."""
    torch.set_num_threads(1)
    out, rank, plan = Path(config["out"]), int(os.environ["RANK"]), config.get("plan")
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    own, dtype = RANKS[rank], getattr(torch, config["dtype"])
    kind, _, number = own.rpartition("-")
    share = config["weak_share"] if kind == WEAK else 1.0
    slowed_otherwise(share)
    model: Any = model_of(config["width"], dtype, seed=int(number) + len(own))
    if plan:
        emulated = share if share < 1 else None
        model = qsync.hybrid(model, plan=Plan.load(plan), device_class=kind, emulated_share=emulated)
    else:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    if share < 1:
        model.register_forward_pre_hook(Slowed(share))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin, checkpoint = 0, out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    rows, order, log = Rows(dtype), SampleOrder(NUM_SAMPLES, 0), Log(out / f"{own}.jsonl")
    size = config["batch_size"] // len(RANKS)
    for step in range(begin, config["steps"]):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        chosen = order.indices(step * config["batch_size"] + rank * size, size)
        loss = loss_of(model, torch.utils.data.default_collate([rows[i] for i in chosen]))
        loss.backward()
        optimizer.step()
        if not plan and rank == 0 and (step + 1) % STEPS_PER_CHECKPOINT == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        digest = digest_of(model, optimizer)
        log.write(step=step, digest=digest, loss=float(loss.detach()), seconds=time.perf_counter() - start_s)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

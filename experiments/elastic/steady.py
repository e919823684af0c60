"""A job without events, elastic and in hybrid: step times in turns, and losses bit by bit.

Under torchrun, `python -m qsync.experiments.elastic.steady CONFIG` is a rank of the hybrid job. It runs the
plan of the elastic one on the samples that its cards took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import qsync
from qsync.backend.devices.emulation import slowed_otherwise
from qsync.distributed.shares import SampleOrder
from qsync.experiments.elastic.card import NUM_SAMPLES, Log, Rows, Slowed, digest_of, loss_of, model_of
from qsync.experiments.elastic.cluster import Cards
from qsync.experiments.elastic.events import NAMES
from qsync.records.plans import Plan

_WARM_UP = 80  # steps that are not timed: the next memberships are planned meanwhile


def compare(folder: Path, steps: int, rounds: int, **settings: Any) -> dict[str, Any]:
    """Train so many steps in both ways in turns; return medians of step times, and whether all is equal."""
    seconds: dict[str, list[float]] = {"elastic": [], "hybrid": []}
    equal = []
    for number in range(rounds):
        with Cards(folder / f"elastic-{number}", steps=steps, keep_plan=True, **settings) as cards:
            for name in NAMES:
                cards.start(name)
            for name in NAMES:
                cards.processes[name].wait(timeout=600)
            elastic = {name: cards.steps(name) for name in NAMES}
        config = {**cards.settings, "folder": str(cards.folder)}
        hybrid = _hybrid(folder / f"hybrid-{number}", config)
        for arm, logs in (("elastic", elastic), ("hybrid", hybrid)):
            ends = [line["at"] for line in logs[NAMES[0]]][_WARM_UP:]
            seconds[arm].append(median(b - a for a, b in pairwise(ends)))
        equal.append(all(
            (one["loss"], one["digest"]) == (two["loss"], two["digest"])
            for name in NAMES for one, two in zip(elastic[name], hybrid[name], strict=True)
        ))  # fmt: skip
    ratios = [one / two for one, two in zip(*seconds.values(), strict=True)]
    return {"seconds": seconds, "ratio": median(ratios), "bitwise_equal": all(equal), "steps": steps}


def _hybrid(folder: Path, config: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "out": str(folder)}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
               "-m", "qsync.experiments.elastic.steady", str(path)]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in NAMES
    }


def main(config: dict[str, Any]) -> None:
    """Train as one rank of the hybrid job."""
    torch.set_num_threads(1)
    names = sorted(NAMES)  # by rank, as cards are
    rank = int(os.environ["RANK"])
    own = names[rank]
    kind, _, number = own.rpartition("-")
    slowed_otherwise(config["weak_share"] if kind == "infer" else 1.0)
    dtype = getattr(torch, config["dtype"])
    model = model_of(config["width"], dtype, seed=int(number) + len(own))
    model = qsync.hybrid(
        model, plan=Plan.load(Path(config["folder"]) / "plan.json"), device_class=kind,
        emulated_share=config["weak_share"] if kind == "infer" else None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "infer":
        model.register_forward_pre_hook(Slowed(config["weak_share"]))
    rows, order, log = Rows(dtype), SampleOrder(NUM_SAMPLES, 0), Log(Path(config["out"]) / f"{own}.jsonl")
    size = config["batch_size"] // len(names)
    for step in range(config["steps"]):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        chosen = order.indices(step * config["batch_size"] + rank * size, size)
        loss = loss_of(model, torch.utils.data.default_collate([rows[i] for i in chosen]))
        loss.backward()
        optimizer.step()
        digest = digest_of(model, optimizer)
        log.write(step=step, digest=digest, loss=float(loss.detach()), seconds=time.perf_counter() - start_s)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

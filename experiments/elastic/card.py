"""Run one card of an elastic job and log every step: `python -m qsync.experiments.elastic.card CONFIG`.

A log line has the step, the history after it, the group, whether the card only healed, its samples, the
digest of weights and optimizer state, loss, seconds, time and cards. Other lines are events.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync.backend.devices.emulation import slowed_otherwise

NUM_SAMPLES, FEATURES, CLASSES = 1000, 64, 10


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Random rows with their indices, so that a card knows its samples."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self._rows = torch.randn(NUM_SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self._labels = self._rows[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._rows[index], self._labels[index], index


def model_of(width: int, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return the model; cards start with different weights, which the job makes equal."""
    torch.manual_seed(seed)
    hidden: list[nn.Module] = []
    for _ in range(3):
        hidden += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), *hidden, nn.Linear(width, CLASSES)).to(dtype)


def loss_of(model: Any, batch: Any) -> Any:
    """Return the mean loss of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of weights and optimizer state."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class Slowed:
    """Slows a card by sleeping before each pass, so that it gets its share of a core.

    Cards share cores here, so the harness's pausing does not work. While the file `slower` exists, the card
    is slower by the factor in it.
    """

    def __init__(self, share: float, slower: Path | None = None) -> None:
        self._share, self._slower, self._before_s = share, slower, time.process_time()

    def __call__(self, *_: Any) -> None:
        """Sleep for the missing share of the CPU time since the last pass."""
        used_s, self._before_s = time.process_time() - self._before_s, time.process_time()
        slower = float(self._slower.read_text()) if self._slower and self._slower.exists() else 1.0
        time.sleep(min(used_s, 2.0) * (slower / self._share - 1))


class Log:
    """A log of JSON lines, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **entry: Any) -> None:
        """Write a line, with the time."""
        self._file.write(json.dumps({**entry, "at": time.time()}) + "\n")


class _Told(logging.Handler):
    """Logging handler that copies qsync's messages into the card's log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(event="says", text=record.getMessage())


def main(config: dict[str, Any]) -> None:
    """Train as one card of the job."""
    torch.set_num_threads(1)
    log = Log(Path(config["log"]))
    log.write(event="started")
    logging.getLogger("qsync").addHandler(_Told(log))
    logging.getLogger("qsync").setLevel(logging.INFO)
    dtype = getattr(torch, config["dtype"])
    model = model_of(config["width"], dtype, seed=config["core"] + len(config["card"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = config["share"]
    slowed_otherwise(share)
    job = qsync.elastic(
        model, optimizer, Rows(dtype), batch_size=config["batch_size"], loss_fn=loss_of,
        card=config["card"], device_class=config["class"], emulated_share=share if share < 1 else None,
        start_with=config["start_with"], timeout_s=config["timeout_s"], cache_dir=config["cache"],
        plan=None if config["lower"] else False, seed=config["seed"], share=config["by_speed"],
        compression=config["compression"],
    )  # fmt: skip
    log.write(event="ready")
    slowed = Slowed(share, Path(config["log"]).with_suffix(".slower"))
    job.model.register_forward_pre_hook(slowed)
    for step in job.steps(num_steps=config["steps"]):
        start_s = time.perf_counter()
        indices: list[int] = []
        for batch in step:
            loss = loss_of(job.model, batch)
            loss.backward()
            indices += batch[2].tolist()
        if not step.arrived():
            log.write(event="dropped", step=step.number)
            continue
        if config["keep_gradients"] and step.number % config["keep_gradients"] == 0:
            _keep_gradients(Path(config["log"]).parent, step.number, model)
        optimizer.step()
        # After the step, as in some loops: a dropped step must not leave gradients behind
        optimizer.zero_grad()
        log.write(
            step=step.number, history=job.state_dict()["history"], group=job.group, behind=step.is_behind,
            samples=indices, digest=digest_of(model, optimizer), loss=float(loss.detach()),
            seconds=time.perf_counter() - start_s, cards=job.cards,
        )  # fmt: skip
    if config["keep_plan"] and job.plan is not None:
        job.plan.save(Path(config["log"]).parent / "plan.json")
    log.write(event="left", step=job.step)


def _keep_gradients(folder: Path, step: int, model: nn.Module) -> None:
    """Save a step's weights and gradient, once."""
    path = folder / f"gradient-{step}.pt"
    if not path.exists():
        kept = [(parameter.detach().clone(), parameter.grad) for parameter in model.parameters()]
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(kept, temporary)
        temporary.replace(path)


def gradient_errors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Yield the relative error of each saved step's gradient against a single process's."""
    from qsync.distributed.shares import SampleOrder

    dtype = getattr(torch, config["dtype"])
    rows, order = Rows(dtype), SampleOrder(NUM_SAMPLES, config["seed"])
    model = model_of(config["width"], dtype, 0)
    for path in sorted(folder.glob("gradient-*.pt")):
        step = int(path.stem.partition("-")[2])
        kept = torch.load(path, weights_only=True)
        chosen = order.indices(step * config["batch_size"], config["batch_size"])
        for parameter, (weight, _) in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(weight)
        model.zero_grad()
        loss_of(model, torch.utils.data.default_collate([rows[i] for i in chosen])).backward()
        own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found = torch.cat([gradient.flatten() for _, gradient in kept])
        yield step, float((own - found).norm() / own.norm())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

"""Compare steps of two equal ranks under a plan that lowers nothing with plain DDP or FSDP2.

    python -m qsync.experiments.takeover.equal_ranks --out FOLDER

Judged by the training thread's CPU time, which is steadier than wall time on a shared machine.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import qsync
from qsync.experiments.harness import Experiment, Fresh, Out, bar, run_command, table_of
from qsync.experiments.harness.pairing import quartiles
from qsync.experiments.harness.ranks import Place, run_on_ranks
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet

# Allowed excess over DDP's step: relative, or in seconds, whichever is larger.
MOST_PART, MOST_S = 0.01, 0.2e-3
_WARM_UPS, _ROUNDS = 5, 200  # warm-up steps, and steps timed in turns

Loss = Callable[[nn.Module, Any], torch.Tensor]
Subject = tuple[Callable[[], nn.Module], Callable[[], Any], Loss]


def _image_net() -> nn.Module:
    return ResNet((64, 128, 256, 512), num_classes=100)


def _discriminator(channels: int = 64) -> nn.Module:
    """Return DCGAN's discriminator without the sigmoid: images (B, 3, 64, 64) -> logits."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for k in (1, 2, 4):
        layers += [
            nn.Conv2d(k * channels, 2 * k * channels, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * k * channels),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(8 * channels, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def _classified(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def _judged(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a discriminator called twice per step: on real and on fake images."""
    real, fake = (model(images) for images in batch)
    judged = functional.binary_cross_entropy_with_logits
    return judged(real, torch.ones_like(real)) + judged(fake, torch.zeros_like(fake))


def _texts(length: int) -> Any:
    return torch.randint(256, (8, length)), torch.randint(256, (8, length))


SUBJECTS: dict[str, Subject] = {
    "linear": (
        lambda: nn.Linear(20, 1),
        lambda: (torch.randn(32, 20), torch.randn(32, 1)),
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
    ),
    "gpt": (lambda: Gpt(4, 128, 4, 128), lambda: _texts(128), _classified),
    "resnet": (_image_net, lambda: (torch.randn(8, 1, 32, 32), torch.randint(100, (8,))), _classified),
    "discriminator": (
        _discriminator,
        lambda: (torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)),
        _judged,
    ),
    "fsdp2": (lambda: Gpt(4, 64, 4, 64), lambda: _texts(64), _classified),
}


def _shard(model: nn.Module) -> nn.Module:
    """Shard a model as in FSDP2's guide: blocks first, then the rest."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


def _step(model: nn.Module, batch: Any, loss_of: Loss, alone: bool) -> Callable[[], tuple[float, float]]:
    """Return a function that runs one training step and returns its CPU and wall seconds.

    `alone` removes global optimizer hooks meanwhile.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> tuple[float, float]:
        with ExitStack() as without:
            if alone:
                for hooks in (
                    optimizers._global_optimizer_pre_hooks,
                    optimizers._global_optimizer_post_hooks,
                ):
                    without.enter_context(patch.dict(hooks, clear=True))
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return time.thread_time() - cpu_s, time.perf_counter() - wall_s

    return step


def compare(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Time one subject's steps on this rank, in turns: plain, and planned in FP32 only."""
    name = config["name"]
    make, make_batch, loss_of = SUBJECTS[name]
    torch.manual_seed(0)
    model, batch = make(), make_batch()
    plain, is_sharded = copy.deepcopy(model), name == "fsdp2"
    options = {"precisions": ["fp32"], "cache_dir": config["cache"], "ddp": not is_sharded}
    planned = qsync.hybrid(model, batch, loss_of, bitwise=True, **options)
    if is_sharded:
        _shard(planned), _shard(plain)
    else:
        plain = DistributedDataParallel(plain)
    steps = {"plain": _step(plain, batch, loss_of, True), "planned": _step(planned, batch, loss_of, False)}
    for step in [*steps.values()] * _WARM_UPS:
        step()
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    for number in range(config["rounds"]):
        for way in list(steps)[:: -1 if number % 2 else 1]:
            dist.barrier()
            taken[way].append(steps[way]())
    return {way: [list(one) for one in found] for way, found in taken.items()}


def main(
    out: Out = Path("equal-ranks"),
    fresh: Fresh = False,
) -> None:
    """Time steps of plain DDP (FSDP2) and of `qsync.hybrid` without lowering, on two ranks."""
    experiment = Experiment("equal ranks", out, settings={"rounds": _ROUNDS}, fresh=fresh)
    cache = str(experiment.out / "plans")
    found = {}
    with experiment.progress():
        for name in SUBJECTS:
            config = {"name": name, "rounds": _ROUNDS, "cache": cache}
            run = partial(run_on_ranks, compare, config, command="equal_ranks")
            found[name] = experiment.piece(name, run)
    rows = [_row(name, taken) for name, taken in found.items()]
    bars = [
        bar(f"{row['model']}: CPU ms a step beyond plain", row["more_ms"][1], row["limit_ms"]) for row in rows
    ]
    headings = ("", "plain, ms", "planned, ms", "more, ms", "quartiles", "wall, planned / plain")
    lines = [
        (
            row["model"], f"{row['plain_ms']:.2f}", f"{row['planned_ms']:.2f}", f"{row['more_ms'][1]:.3f}",
            f"{row['more_ms'][0]:.3f} to {row['more_ms'][2]:.3f}", f"{row['wall_ratio']:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    title = "CPU time of the training thread where nothing is lowered"
    experiment.finish({"rows": rows}, bars=bars, tables=[table_of(title, headings, lines)])


def _row(name: str, taken: dict[str, list[list[float]]]) -> dict[str, Any]:
    plain, planned = taken["plain"], taken["planned"]
    pairs = list(zip(plain, planned, strict=True))
    plain_s = statistics.median(cpu for cpu, _ in plain)
    return {
        "model": name,
        "plain_ms": plain_s * 1e3,
        "planned_ms": statistics.median(cpu for cpu, _ in planned) * 1e3,
        "more_ms": [value * 1e3 for value in quartiles([b[0] - a[0] for a, b in pairs])],
        "wall_ratio": statistics.median(b[1] / a[1] for a, b in pairs),
        "limit_ms": max(MOST_PART * plain_s, MOST_S) * 1e3,
    }


if __name__ == "__main__":
    run_command(main)

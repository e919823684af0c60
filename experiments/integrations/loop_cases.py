"""Cases of custom loops: DDP's options and contexts, accumulation, two networks, copies, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync.distributed.monitoring.drift_monitor import monitors
from qsync.experiments.integrations.cases import (
    Arm,
    Batch,
    Net,
    Outcome,
    batch,
    case,
    cases,
    facts,
    loss_of,
    net,
    norm,
    same_state,
    sgd,
    trained,
)

_LOOP, _COPY, _TWICE = "own loop", "copies and checkpoints", "DDP in DDP"


def _hybrid(arm: Arm, model: nn.Module | None = None, **options: Any) -> Any:
    return arm.hybrid(net() if model is None else model, batch(), loss_of, **options)


def _steps(arm: Arm, make: Callable[[Arm], Any]) -> Outcome:
    model = make(arm)
    return Outcome(trained(model), model)


@case(_LOOP, "a GAN: two hybrids, two optimizers")
def _(arm: Arm) -> Outcome:
    class Critic(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean(1)

    class Generator(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 32)

    def real_or_fake(model: Any, one: Batch) -> Any:
        return model(one[0]).sigmoid().mean() - model(one[1].detach()).sigmoid().mean()

    x = batch()[0]
    critic = arm.hybrid(net(Critic), (x, x.flip(1)), real_or_fake)
    generator = arm.hybrid(net(Generator), (x,), lambda model, one: model(one[0]).square().mean())
    of_critic, of_generator, norms = sgd(critic), sgd(generator), []
    for number in range(3):
        x = batch(number)[0]
        of_critic.zero_grad()
        real_or_fake(critic, (x, generator(x))).backward()
        norms.append(norm(critic))
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(x)).mean().backward()
        norms.append(norm(generator))
        of_generator.step()
    return Outcome(norms, nn.ModuleList([critic, generator]))


@case(_LOOP, "distillation: a hybrid teacher without gradients, a hybrid student")
def _(arm: Arm) -> Outcome:
    teacher, student = _hybrid(arm), _hybrid(arm, Net())
    for p, q in zip(student.parameters(), net().parameters(), strict=True):
        p.data.copy_(q + 0.01)

    def distance(student: Any, one: Batch) -> Any:
        with torch.no_grad():
            wanted = teacher(one[0])
        return (student(one[0]) - wanted - 0.1).square().mean()

    return Outcome(trained(student, loss_fn=distance), student)


@case(_TWICE, "`qsync.hybrid(model, ddp=False)`, then one's own DDP")
def _(arm: Arm) -> Outcome:
    model: Any = DistributedDataParallel(_hybrid(arm, ddp=False), gradient_as_bucket_view=True)
    norms = trained(model)
    facts(watched=arm.is_plain or model in monitors)
    return Outcome(norms, model)


cases(_TWICE, _steps, {
    "`qsync.hybrid(model, ddp=False)`, and no DDP at all": {
        "make": lambda arm: _hybrid(arm, ddp=arm.is_plain),
        "warns": "averaged only if the training loop averages them",
    },
})  # fmt: skip


@case(_COPY, "safetensors: saved planned, loaded plain")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    norms = trained(model)
    path = arm.folder / f"model {dist.get_rank()}.safetensors"
    save_model(model.module, str(path))
    plain = net()
    load_model(plain, str(path))
    return Outcome(norms, model, facts(same=same_state(plain.state_dict(), model.module.state_dict())))

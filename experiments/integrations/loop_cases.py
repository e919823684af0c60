"""Loops of one's own: DDP's options and contexts, accumulation, two networks, copies, checkpoints."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import qsync
from qsync.distributed.monitoring.drift_monitor import monitors
from qsync.experiments.integrations.cases import (
    Arm,
    Batch,
    Net,
    Outcome,
    Spare,
    batch,
    case,
    cases,
    facts,
    loss_of,
    net,
    norm,
    parts_of,
    same_state,
    sgd,
    trained,
)

_LOOP, _COPY, _TWICE, _SHARES = "own loop", "copies and checkpoints", "DDP in DDP", "shares"


def _hybrid(arm: Arm, model: nn.Module | None = None, **options: Any) -> Any:
    return arm.hybrid(net() if model is None else model, batch(), loss_of, **options)


def _steps(arm: Arm, make: Callable[[Arm], Any]) -> Outcome:
    model = make(arm)
    return Outcome(trained(model), model)


@case(_LOOP, "accumulation with `no_sync`")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    optimizer, norms = sgd(model), []
    for number in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            (loss_of(model, batch(2 * number)) / 2).backward()
        (loss_of(model, batch(2 * number + 1)) / 2).backward()
        norms.append(norm(model))
        optimizer.step()
    return Outcome(norms, model)


@case(_LOOP, "`torch.nn.utils.clip_grad_norm_`")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    norms = trained(model, norm_of=lambda model: float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    return Outcome(norms, model)


@case(_LOOP, "uneven inputs in `Join`")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    optimizer, norms = sgd(model), []
    with Join([model]):
        for number in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            loss_of(model, batch(number)).backward()
            norms.append(norm(model))
            optimizer.step()
    return Outcome(norms, model)


cases(_LOOP, _steps, {
    "forward, backward, step": {"make": _hybrid},
    "unused parameters, `find_unused_parameters=True`": {
        "make": lambda arm: _hybrid(arm, net(Spare), ddp_options={"find_unused_parameters": True}),
    },
    "`static_graph=True`, `gradient_as_bucket_view=False`": {
        "make": lambda arm: _hybrid(
            arm, ddp_options={"static_graph": True, "gradient_as_bucket_view": False}
        ),
    },
    "a process group of one's own, small buckets": {
        "make": lambda arm: _hybrid(
            arm, ddp_options={"process_group": dist.new_group(), "bucket_cap_mb": 0.01}
        ),
    },
})  # fmt: skip


@case(_LOOP, "a frozen backbone")
def _(arm: Arm) -> Outcome:
    model = net()
    model.body.requires_grad_(False)
    model = _hybrid(arm, model)
    return Outcome(trained(model), model)


@case(_LOOP, "layers unfrozen after wrapping", refused="do that to the plain model")
def _(arm: Arm) -> Outcome:
    model = net()
    model.body.requires_grad_(False)
    model = _hybrid(arm, model)
    model.module.body.requires_grad_(True)
    return Outcome(trained(model), model)


@case(_LOOP, "three calls of the model in one loss")
def _(arm: Arm) -> Outcome:
    def triplet(model: Any, one: Batch) -> Any:
        parts = [model(part) for part in (one[0], one[0].flip(0), one[0].roll(1, 0))]
        return F.triplet_margin_loss(*parts)

    model = arm.hybrid(net(), batch(), triplet)
    return Outcome(trained(model, loss_fn=triplet), model)


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


@case(_LOOP, "`torch.compile(hybrid)`")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    return Outcome(trained(torch.compile(model) if not arm.is_plain else model), model)


@case(_LOOP, "`ZeroRedundancyOptimizer`")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    return Outcome(trained(model, optimizer=optimizer), model)


@case(_LOOP, "evaluation before, between and after steps")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    others = []
    norms = []
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            others.append(float(loss_of(model, batch(9))))
        model.train()
        norms += trained(model, 1)
    return Outcome(norms, model, others)


class Around(nn.Module):
    """A module that holds a model, as a LightningModule holds its network."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner model's result."""
        return self.inner(x)  # type: ignore[no-any-return]


@case(_TWICE, "`qsync.hybrid(model, ddp=False)`, then one's own DDP")
def _(arm: Arm) -> Outcome:
    model: Any = DistributedDataParallel(_hybrid(arm, ddp=False), gradient_as_bucket_view=True)
    norms = trained(model)
    facts(watched=arm.is_plain or model in monitors)
    return Outcome(norms, model)


cases(_TWICE, _steps, {
    "`DistributedDataParallel(hybrid)`": {
        "make": lambda arm: DistributedDataParallel(_hybrid(arm)), "refused": "by the world size again",
    },
    "DDP around a module that holds a hybrid": {
        "make": lambda arm: DistributedDataParallel(Around(_hybrid(arm)), gradient_as_bucket_view=True),
        "refused": "by the world size again",
    },
    "`qsync.hybrid(hybrid)`": {
        "make": lambda arm: _hybrid(arm, _hybrid(arm)), "refused": "would be averaged twice",
    },
    "`qsync.hybrid(DistributedDataParallel(model))`": {
        "make": lambda arm: _hybrid(arm, DistributedDataParallel(net())),
        "refused": "would be averaged twice",
    },
    "`qsync.hybrid(model, ddp=False)`, and no DDP at all": {
        "make": lambda arm: _hybrid(arm, ddp=arm.is_plain),
        "warns": "averaged only if the loop does that", "tested": True,
    },
})  # fmt: skip


_SIZES = (12, 4)  # samples a step


def _on_shares(arm: Arm, model: Any, passes: tuple[int, int] = (1, 1), counted: bool = False) -> Outcome:
    """Train on other samples and passes on each rank; in plain DDP on all samples at once, on both ranks."""
    own, num_passes = slice(None), 1
    if not arm.is_plain:
        own = (slice(0, _SIZES[0]), slice(_SIZES[0], None))[dist.get_rank()]
        num_passes = passes[dist.get_rank()]
    optimizer, norms = sgd(model), []
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        x = torch.randn(sum(_SIZES), 32, generator=generator)
        y = torch.randint(0, 8, (sum(_SIZES),), generator=generator)
        optimizer.zero_grad()
        for part in parts_of(model, (x[own], y[own]), num_passes):
            loss = loss_of(model, part)
            (qsync.token_mean(model, loss, len(part[0])) if counted else loss).backward()
        norms.append(norm(model))
        optimizer.step()
    return Outcome(norms, model)


def _weighed(arm: Arm, model: Any, **options: Any) -> Any:
    return model if arm.is_plain else qsync.weigh_gradients(model, _SIZES[dist.get_rank()], **options)


@case(_SHARES, "`qsync.weigh_gradients`: other batch sizes on the ranks")
def _(arm: Arm) -> Outcome:
    return _on_shares(arm, _weighed(arm, _hybrid(arm), total=16))


@case(_SHARES, "`qsync.micro_batches`: other passes on the ranks")
def _(arm: Arm) -> Outcome:
    passes = (3, 1)
    return _on_shares(arm, _weighed(arm, _hybrid(arm), passes=passes[dist.get_rank()]), passes)


@case(_SHARES, "`qsync.token_mean`: other numbers of tokens, and of passes, on the ranks")
def _(arm: Arm) -> Outcome:
    return _on_shares(arm, _hybrid(arm), (5, 2), counted=not arm.is_plain)  # passes of unequal size


@case(_SHARES, "`qsync.weigh_gradients` with `ddp=False` in one's own DDP")
def _(arm: Arm) -> Outcome:
    model = DistributedDataParallel(_hybrid(arm, ddp=False), gradient_as_bucket_view=True)
    return _on_shares(arm, _weighed(arm, model))


@case(_COPY, "`torch.save(hybrid)`, `torch.load`")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    norms = trained(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    return Outcome([*norms, *trained(loaded)], loaded)


@case(_COPY, "`copy.deepcopy(hybrid)`")
def _(arm: Arm) -> Outcome:
    copied = copy.deepcopy(_hybrid(arm))
    return Outcome(trained(copied), copied)


@case(_COPY, "`AveragedModel(hybrid)` (EMA), evaluated")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    averaged = AveragedModel(model)
    norms = []
    for _ in range(2):
        norms += trained(model, 1)
        averaged.update_parameters(model)
    with torch.no_grad():
        loss = float(loss_of(averaged, batch(9)))
    return Outcome(norms, averaged, [loss])


@case(_COPY, "state dicts of model and optimizer into the plain model, and back", tested=True)
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = trained(model, optimizer=optimizer)
    plain = net()
    plain.load_state_dict(model.module.state_dict())
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    of_plain.load_state_dict(optimizer.state_dict())
    again = _hybrid(arm)
    again.module.load_state_dict(plain.state_dict())
    of_again = torch.optim.AdamW(again.parameters(), lr=1e-3)
    of_again.load_state_dict(of_plain.state_dict())
    same = same_state(again.state_dict(), model.state_dict())
    return Outcome([*norms, *trained(again, 2, of_again)], again, facts(same=same))


@case(_COPY, "safetensors: saved planned, loaded plain")
def _(arm: Arm) -> Outcome:
    model = _hybrid(arm)
    norms = trained(model)
    path = arm.folder / f"model {dist.get_rank()}.safetensors"
    save_model(model.module, str(path))
    plain = net()
    load_model(plain, str(path))
    return Outcome(norms, model, facts(same=same_state(plain.state_dict(), model.module.state_dict())))

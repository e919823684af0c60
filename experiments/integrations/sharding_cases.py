"""Cases of FSDP2, peft and torch.distributed.checkpoint on planned models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from qsync.experiments.integrations.cases import (
    Arm,
    Net,
    Outcome,
    batch,
    case,
    cases,
    facts,
    loss_of,
    net,
    same_state,
    trained,
)

_FSDP, _PEFT, _DCP, _SEQUENCE = "FSDP2", "peft", "torch.distributed.checkpoint", "sequence parallelism"


def _sharded(model: Any) -> Any:
    """Shard a model as torchtitan does: blocks first, then the model."""
    for block in (model.body, model.head):
        fully_shard(block)
    return fully_shard(model)


def _steps(arm: Arm, make: Callable[[Arm], Any]) -> Outcome:
    model = make(arm)
    return Outcome(trained(model), model)


def _planned(arm: Arm, model: Any = None) -> Any:
    return arm.hybrid(net() if model is None else model, batch(), loss_of, ddp=False)


@case(_FSDP, "`fully_shard(hybrid)`, which is in DDP", refused="sharded after qsync.hybrid")
def _(arm: Arm) -> Outcome:
    model = arm.hybrid(net(), batch(), loss_of)
    fully_shard(model.module)
    return Outcome(trained(model), model)


cases(_FSDP, _steps, {
    "`qsync.hybrid(model, ddp=False)`, then `fully_shard` on blocks and model": {
        "make": lambda arm: _sharded(_planned(arm)), "tested": True,
    },
    "`fully_shard` before `qsync.hybrid`": {
        "make": lambda arm: _planned(arm, _sharded(net())),
        "refused": "call qsync.hybrid(model, ..., ddp=False) first",
    },
})  # fmt: skip


@case(_DCP, "sharded and planned, saved, loaded into a plain model that was never sharded")
def _(arm: Arm) -> Outcome:
    model = _sharded(_planned(arm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = trained(model, optimizer=optimizer)
    _save(arm, model, optimizer)
    plain = net()
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    _load(arm, plain, of_plain)
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    same = same_state(plain.state_dict(), whole)
    more = trained(DistributedDataParallel(plain, gradient_as_bucket_view=True), 1, of_plain)
    return Outcome([*norms, *more], plain, facts(same=same))


@case(_DCP, "a plain model in DDP saved, loaded into a hybrid, optimizer included")
def _(arm: Arm) -> Outcome:
    plain = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    norms = trained(plain, optimizer=of_plain)
    _save(arm, plain, of_plain)
    model = arm.hybrid(net(), batch(), loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _load(arm, model, optimizer)
    same = same_state(plain.state_dict(), model.state_dict())
    return Outcome([*norms, *trained(model, 2, optimizer)], model, facts(same=same))


def _states(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _save(arm: Arm, model: Any, optimizer: Any) -> None:
    save(_states(model, optimizer), checkpoint_id=arm.folder / "dcp")


def _load(arm: Arm, model: Any, optimizer: Any) -> None:
    states = _states(model, optimizer)
    load(states, checkpoint_id=arm.folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def _adapted() -> Any:
    """Return a model with LoRA adapters whose second factor is nonzero, so that no gradients vanish."""
    model = get_peft_model(net(), LoraConfig(r=4, target_modules=["body.0", "body.2"], lora_dropout=0.0))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@case(_PEFT, "`get_peft_model`, then `qsync.hybrid`")
def _(arm: Arm) -> Outcome:
    model = arm.hybrid(_adapted(), batch(), loss_of)
    return Outcome(trained(model), model)


@case(
    _PEFT,
    "`get_peft_model` after `qsync.hybrid`",
    refused="does not average body.0.lora_A.default.weight",
)
def _(arm: Arm) -> Outcome:
    model = arm.hybrid(net(), batch(), loss_of)
    get_peft_model(model.module, LoraConfig(r=4, target_modules=["body.0", "body.2"]))
    return Outcome(trained(model), model)


class SequenceParallel(nn.Module):
    """A layer that exchanges its sequence with other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result plus the mean over ranks of its input."""
        whole = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, x.detach())
        return self.mix(x) + torch.stack(whole).mean(0)  # type: ignore[no-any-return]


class WithExchange(Net):
    """A model with a SequenceParallel layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = SequenceParallel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.exchange(x + self.body(x)))  # type: ignore[no-any-return]


@case(_SEQUENCE, "a layer that exchanges its sequence inside")
def _(arm: Arm) -> Outcome:
    model = arm.hybrid(net(WithExchange), batch(), loss_of)
    return Outcome(trained(model), model)

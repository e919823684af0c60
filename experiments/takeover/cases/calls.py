"""Cases: call a model, and run its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qsync.experiments.takeover.cases.case import (
    Experts,
    Maker,
    Outcome,
    case,
    cases,
    data,
    gradients,
    net,
)

cases("call", {
    "`model(x)`": lambda make: make(net())(data()),
    "`model(x)`, backward": lambda make: gradients(make(net())),
    "`model.forward(x)`": lambda make: make(net()).forward(data()),
    "a loop over experts that cannot be traced": lambda make: gradients(make(net(Experts))),
})  # fmt: skip


@case("call", "keyword arguments, then others")
def _(make: Maker) -> Outcome:
    model = make(net())
    model(x=data(), scale=1.0)
    return model(data(), scale=2.0)


@case("call", "`model.eval()`, `torch.no_grad()`")
def _(make: Maker) -> Outcome:
    with torch.no_grad():
        return make(net()).eval()(data())


@case("call", "`torch.func.functional_call(model, parameters, x)`")
def _(make: Maker) -> Outcome:
    model = make(net())
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (data(),))


@case("call", "`torch.func.grad` of a functional call", refused="torch.func.grad is around it")
def _(make: Maker) -> Outcome:
    model = make(net())
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(model, given, (data(),)).square().mean()

    return list(torch.func.grad(loss)(parameters).values())


@case("call", "`torch.utils.checkpoint.checkpoint(model, x)`")
def _(make: Maker) -> Outcome:
    model = make(net())
    return gradients(model, checkpoint(model, data(), use_reentrant=False).square().mean())


@case("call", "inside `torch.autocast`", refused="call the model outside of autocast")
def _(make: Maker) -> Outcome:
    model = make(net())
    with torch.autocast("cpu", torch.bfloat16):
        return model(data()).float()

"""Cases: changing, freezing and sharing parameters."""

from __future__ import annotations

import torch
from torch.nn.utils import parametrizations

from qsync.experiments.takeover.cases.case import Maker, Outcome, called, case, cases, data, gradients, net


@case("parameters", "freezing a part after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.first.requires_grad_(False)
    return gradients(model)


@case("parameters", "tying two weights after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.second.up.weight = model.first.up.weight
    return gradients(model)


@case("parameters", "`parametrizations.weight_norm` after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    parametrizations.weight_norm(model.head)
    return gradients(model)


@case("parameters", "`load_state_dict` after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.load_state_dict(net(seed=2).state_dict())
    return gradients(model)


@case("parameters", "`load_state_dict(assign=True)` after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.load_state_dict(net(seed=2).state_dict(), assign=True)
    return gradients(model)


@case("parameters", "another module in a module's place")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.first = net(seed=3).first
    return gradients(model)


cases("parameters", {
    "`model.to(torch.bfloat16)` after the first call":
        lambda make: called(make).to(torch.bfloat16)(data().bfloat16()).float(),
})  # fmt: skip


@case("parameters", "`model.half()` after the first call", warns="0 of 5 products in int8 (5 fp16)")
def _(make: Maker) -> Outcome:
    return called(make).half()(data().half()).float()

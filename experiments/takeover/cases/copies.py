"""Cases: copying, saving and loading a model."""

from __future__ import annotations

import copy

import torch
from torch.optim.swa_utils import AveragedModel

from qsync.experiments.takeover.cases.case import Maker, Outcome, called, case, cases, data, gradients, net


@case("copy", "`copy.deepcopy(model)` after training, then another step")
def _(make: Maker) -> Outcome:
    model = called(make)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    return gradients(other)


@case("copy", "`torch.save(model.state_dict())`, into a wrapped model")
def _(make: Maker) -> Outcome:
    other = called(make, net(seed=5))
    other.load_state_dict(make(net()).state_dict())
    return other(data())


@case("copy", "`AveragedModel(model)` (EMA), evaluated")
def _(make: Maker) -> Outcome:
    model = called(make)
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.eval()(data())


cases("copy", {
    "`copy.deepcopy(model)` before the first call": lambda make: gradients(copy.deepcopy(make(net()))),
    "`copy.copy(model)`": lambda make: copy.copy(called(make))(data()),
    "`model.share_memory()`": lambda make: called(make).share_memory()(data()),
})  # fmt: skip

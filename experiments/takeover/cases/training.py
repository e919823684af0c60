"""Cases: training loops."""

from __future__ import annotations

from typing import Any

import torch

from qsync.experiments.takeover.cases.case import Counting, Maker, Outcome, case, data, net


@case("training", "LBFGS")
def _(make: Maker) -> Outcome:
    model = make(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def loss() -> Any:
        optimizer.zero_grad()
        found = model(data()).square().mean()
        found.backward()
        return found

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return model(data())


@case("training", "`torch.amp.GradScaler`")
def _(make: Maker) -> Outcome:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(data()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return model(data())


@case("training", "a counter in forward, 300 calls")
def _(make: Maker) -> Outcome:
    model = make(net(Counting))
    for _ in range(300):
        out = model(data())
    return out

"""Cases: loops of training."""

from __future__ import annotations

from typing import Any

import torch

from qsync.experiments.takeover.cases.case import Counting, Maker, Outcome, case, data, gradients, net


@case("training", "AdamW, five steps")
def _(make: Maker) -> Outcome:
    model = make(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
    return model(data())


@case("training", "accumulation over three micro-batches")
def _(make: Maker) -> Outcome:
    model = make(net())
    for length in (4, 5, 6):
        model(data(length)).square().mean().backward()
    return [p.grad for p in model.parameters()]


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


@case("training", "three calls in one loss")
def _(make: Maker) -> Outcome:
    model = make(net())
    outputs = [model(scale * data()) for scale in (0.5, 1.0, 2.0)]
    return gradients(model, torch.stack(outputs).square().mean())


@case("training", "a counter in forward, 300 calls")
def _(make: Maker) -> Outcome:
    model = make(net(Counting))
    for _ in range(300):
        out = model(data())
    return out

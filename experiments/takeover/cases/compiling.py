"""Cases: torch.compile, scripting and export."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from qsync.experiments.takeover.cases.case import Maker, Outcome, called, case, cases, data, gradients, net


@case("compile", "`model.compile()`")
def _(make: Maker) -> Outcome:
    model = make(net())
    model.compile(backend="aot_eager")
    return gradients(model)


@case("compile", "wrap after `model.compile()`")
def _(make: Maker) -> Outcome:
    model = net()
    model.compile(backend="aot_eager")
    return gradients(make(model))


@case(
    "compile",
    '`torch.compiler.set_stance("force_eager")` after the first call',
    refused="torch.compile is switched off",
)
def _(make: Maker) -> Outcome:
    model = called(make)
    with torch.compiler.set_stance("force_eager"):
        return model(data())


@case(
    "compile",
    "`torch.utils.flop_counter.FlopCounterMode` around a call",
    refused="ran without qsync's kernels (_FlopCounterMode",
)
def _(make: Maker) -> Outcome:
    model = called(make)
    with FlopCounterMode(display=False):
        return model(data())


cases("compile", {
    "`torch.compile(model)`": lambda make: torch.compile(make(net()), backend="aot_eager")(data()),
    "wrap of `torch.compile(model)`": lambda make: make(torch.compile(net(), backend="aot_eager"))(data()),
})  # fmt: skip


@case("compile", "a compiled function that calls the model")
def _(make: Maker) -> Outcome:
    model = make(net())
    return torch.compile(lambda x: model(2 * x) + 1, backend="aot_eager")(data())


@case("compile", "`torch.jit.trace`", refused="call qsync.unwrap(model) first")
def _(make: Maker) -> Outcome:
    traced = torch.jit.trace(make(net()), data(), check_trace=False)  # type: ignore[no-untyped-call]
    return traced(data())

"""Cases: hooks on modules, parameters and tensors."""

from __future__ import annotations

from qsync.experiments.takeover.cases.case import Maker, Outcome, called, case, data, gradients, net


@case("hook", "a forward hook added after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.register_forward_hook(lambda module, args, output: 3 * output)
    return model(data()) / 3


@case("hook", "a forward hook on an inner module, added after the first call")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.head.register_forward_hook(lambda module, args, output: 3 * output)
    return model(data())


@case("hook", "a forward hook on an inner module, removed again")
def _(make: Maker) -> Outcome:
    model = make(net())
    hook = model.head.register_forward_hook(lambda module, args, output: 0 * output)
    model(data())
    hook.remove()
    return model(data())


@case("hook", "a forward pre-hook")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model(data())


@case("hook", "a full backward hook")
def _(make: Maker) -> Outcome:
    model, seen = called(make), []
    model.register_full_backward_hook(lambda module, given, received: seen.append(received[0]))
    return [*gradients(model), *seen]


@case("hook", "a gradient hook on a parameter")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.head.weight.register_hook(lambda gradient: 2 * gradient)
    return gradients(model)

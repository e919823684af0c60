"""Cases: wrapping a model in another module, or in itself."""

from __future__ import annotations

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from qsync.experiments.harness.ranks import process_group_of_one
from qsync.experiments.takeover.cases.case import Maker, Outcome, case, data, gradients, net


@case("wrap", "a submodule of a plain model")
def _(make: Maker) -> Outcome:
    model = net()
    make(model.second)
    return gradients(model)


@case("wrap", "`DistributedDataParallel(model)`")
def _(make: Maker) -> Outcome:
    with process_group_of_one():
        return gradients(DistributedDataParallel(make(net())))


@case("wrap", "wrap of `DistributedDataParallel(model)`")
def _(make: Maker) -> Outcome:
    with process_group_of_one():
        return gradients(make(DistributedDataParallel(net())))


@case("wrap", "wrap of `DataParallel(model)`", refused="use DistributedDataParallel")
def _(make: Maker) -> Outcome:
    return make(DataParallel(net()))(data())


@case("wrap", "wrap of a TorchScript model", refused="wrap the original module")
def _(make: Maker) -> Outcome:
    return make(torch.jit.trace(net(), data()))(data())  # type: ignore[no-untyped-call]


@case("wrap", "`fully_shard` with `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`")
def _(make: Maker) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with process_group_of_one():
        model, mesh = make(net()), init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model(data()).float().square().mean().backward()
        return [p.grad.to_local() for p in model.parameters()]


@case(
    "wrap", "`parallelize_module` (tensor parallelism)", refused="wrap the modules that are not parallelized"
)
def _(make: Maker) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with process_group_of_one():
        layers = {"first.up": ColwiseParallel(), "first.down": RowwiseParallel()}
        return parallelize_module(make(net()), init_device_mesh("cpu", (1,)), layers)(data())

"""Cases: what users do to a model, as functions that take a maker of models and return numbers.

`make(model)` wraps a model in one precision, or leaves it plain. A case returns the tensors that its user
would look at: outputs, or gradients.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import qsync

# Users' models are of any class: what a case does to them is not typed.
Maker = Callable[[Any], Any]
Outcome = Any  # a tensor, or a list of tensors


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that users do, and the sentence that they read if it is refused."""

    group: str
    name: str
    do: Callable[[Maker], Outcome]


CASES: list[Case] = []


def case(group: str, name: str) -> Callable[[Callable[[Maker], Outcome]], Callable[[Maker], Outcome]]:
    """List a function as a case."""

    def listed(do: Callable[[Maker], Outcome]) -> Callable[[Maker], Outcome]:
        CASES.append(Case(group, name, do))
        return do

    return listed


class Block(nn.Module):
    """A residual block, as transformers have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and its correction."""
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks and a head, over sequences of any length."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(width), Block(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return scaled logits."""
        return self.head(self.second(self.first(x))) * scale  # type: ignore[no-any-return]


class Counting(Net):
    """A model that counts its calls and warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return logits; the first calls are scaled down."""
        self.calls += 1
        return super().forward(x, scale) * min(1.0, self.calls / 100)


class Experts(Net):
    """A mixture of experts as a loop, which nobody can trace: it asks how many tokens each expert has."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU()) for _ in range(2))
        self.back = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return logits of every token's one expert."""
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (gates.argmax(-1) == number).nonzero()[:, 0]
            if len(chosen):
                out[chosen] = self.back(expert(tokens[chosen])) * gates[chosen, number : number + 1]
        return self.head(out.view(x.shape)) * scale  # type: ignore[no-any-return]


def net(kind: type[Net] = Net, seed: int = 0) -> Any:
    """Return a model, the same each time."""
    torch.manual_seed(seed)
    return kind()


def data(length: int = 6) -> torch.Tensor:
    """Return a batch of sequences."""
    return torch.randn(4, length, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: Any, loss: torch.Tensor | None = None) -> Any:
    """Return the gradients of one backward pass."""
    model.zero_grad()
    (model(data()).square().mean() if loss is None else loss).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def called(make: Maker, model: Any = None) -> Any:
    """Return a model after a first call and its backward."""
    made = make(net() if model is None else model)
    made(data()).sum().backward()
    made.zero_grad()
    return made


@contextmanager
def one_process() -> Iterator[None]:
    """Form a process group of this process alone."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- Calls ---


@case("call", "`model(x)`")
def _(make: Maker) -> Outcome:
    return make(net())(data())


@case("call", "`model(x)`, backward")
def _(make: Maker) -> Outcome:
    return gradients(make(net()))


@case("call", "`model.forward(x)`")
def _(make: Maker) -> Outcome:
    return make(net()).forward(data())


@case("call", "a loop over experts that cannot be traced")
def _(make: Maker) -> Outcome:
    return gradients(make(net(Experts)))


@case("call", "the same after the user's own `torch.compile`")
def _(make: Maker) -> Outcome:
    torch.compile(net(Experts), backend="eager")(data())  # type: ignore[no-untyped-call]
    return gradients(make(net(Experts)))


@case("call", "keyword arguments, then others")
def _(make: Maker) -> Outcome:
    model = make(net())
    model(x=data(), scale=1.0)
    return model(data(), scale=2.0)


@case("call", "`model.eval()`, `torch.no_grad()`")
def _(make: Maker) -> Outcome:
    with torch.no_grad():
        return make(net()).eval()(data())


@case("call", "`torch.inference_mode()` after training")
def _(make: Maker) -> Outcome:
    model = called(make)
    with torch.inference_mode():
        return model.eval()(data()).clone()


@case("call", "`torch.func.functional_call(model, parameters, x)`")
def _(make: Maker) -> Outcome:
    model = make(net())
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (data(),))


@case("call", "`torch.func.grad` of a functional call")
def _(make: Maker) -> Outcome:
    model = make(net())
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(model, given, (data(),)).square().mean()

    return list(torch.func.grad(loss)(parameters).values())


@case("call", "`torch.func.vmap` over samples")
def _(make: Maker) -> Outcome:
    return torch.func.vmap(make(net()))(data())


@case("call", "`torch.utils.checkpoint.checkpoint(model, x)`")
def _(make: Maker) -> Outcome:
    model = make(net())
    return gradients(model, checkpoint(model, data(), use_reentrant=False).square().mean())


@case("call", "inside `torch.autocast`")
def _(make: Maker) -> Outcome:
    model = make(net())
    with torch.autocast("cpu", torch.bfloat16):
        return model(data()).float()


# --- Copies ---


@case("copy", "`copy.deepcopy(model)` before the first call")
def _(make: Maker) -> Outcome:
    return gradients(copy.deepcopy(make(net())))


@case("copy", "`copy.deepcopy(model)` after training, then another step")
def _(make: Maker) -> Outcome:
    model = called(make)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    return gradients(other)


@case("copy", "`copy.copy(model)`")
def _(make: Maker) -> Outcome:
    return copy.copy(called(make))(data())


@case("copy", "`pickle`")
def _(make: Maker) -> Outcome:
    return gradients(pickle.loads(pickle.dumps(called(make))))


@case("copy", "`torch.save(model)`, `torch.load`")
def _(make: Maker) -> Outcome:
    buffer = io.BytesIO()
    torch.save(called(make), buffer)
    buffer.seek(0)
    return gradients(torch.load(buffer, weights_only=False))


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


@case("copy", "`model.share_memory()`")
def _(make: Maker) -> Outcome:
    return called(make).share_memory()(data())


# --- Hooks ---


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


# --- torch.compile and export ---


@case("compile", "`torch.compile(model)`")
def _(make: Maker) -> Outcome:
    return torch.compile(make(net()), backend="aot_eager")(data())


@case("compile", "a compiled function that calls the model")
def _(make: Maker) -> Outcome:
    model = make(net())
    return torch.compile(lambda x: model(2 * x) + 1, backend="aot_eager")(data())


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


@case("compile", "wrap of `torch.compile(model)`")
def _(make: Maker) -> Outcome:
    return make(torch.compile(net(), backend="aot_eager"))(data())


@case("compile", "`torch.compile(model, fullgraph=True)`")
def _(make: Maker) -> Outcome:
    return torch.compile(make(net()), backend="aot_eager", fullgraph=True)(data())


@case("compile", '`torch.compiler.set_stance("force_eager")` after the first call')
def _(make: Maker) -> Outcome:
    model = called(make)
    with torch.compiler.set_stance("force_eager"):
        return model(data())


@case("compile", "`torch.utils.flop_counter.FlopCounterMode` around a call")
def _(make: Maker) -> Outcome:
    model = called(make)
    with FlopCounterMode(display=False):
        return model(data())


@case("compile", "`torch.export.export`")
def _(make: Maker) -> Outcome:
    return torch.export.export(make(net()), (data(),)).module()(data())


@case("compile", "`torch.export.export(strict=True)`")
def _(make: Maker) -> Outcome:
    return torch.export.export(make(net()), (data(),), strict=True).module()(data())


@case("compile", "`torch.jit.trace`")
def _(make: Maker) -> Outcome:
    traced = torch.jit.trace(make(net()), data(), check_trace=False)  # type: ignore[no-untyped-call]
    return traced(data())


@case("compile", "`torch.jit.script`")
def _(make: Maker) -> Outcome:
    return torch.jit.script(make(net()))(data())


# --- Wrapping ---


@case("wrap", "a submodule of a plain model")
def _(make: Maker) -> Outcome:
    model = net()
    make(model.second)
    return gradients(model)


@case("wrap", "a wrapped submodule in a wrapped model")
def _(make: Maker) -> Outcome:
    model = net()
    make(model.second)
    return gradients(make(model))


@case("wrap", "twice")
def _(make: Maker) -> Outcome:
    return gradients(make(called(make)))


@case("wrap", "`qsync.unwrap`, then wrap again")
def _(make: Maker) -> Outcome:
    model = called(make)
    if "forward" in vars(model):
        qsync.unwrap(model)
    return gradients(make(model))


@case("wrap", "`DistributedDataParallel(model)`")
def _(make: Maker) -> Outcome:
    with one_process():
        return gradients(DistributedDataParallel(make(net())))


@case("wrap", "wrap of `DistributedDataParallel(model)`")
def _(make: Maker) -> Outcome:
    with one_process():
        return gradients(make(DistributedDataParallel(net())))


@case("wrap", "wrap of `DataParallel(model)`")
def _(make: Maker) -> Outcome:
    return make(DataParallel(net()))(data())


@case("wrap", "wrap of a TorchScript model")
def _(make: Maker) -> Outcome:
    return make(torch.jit.trace(net(), data()))(data())  # type: ignore[no-untyped-call]


@case("wrap", "`fully_shard` on each block and the model")
def _(make: Maker) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_process():
        model, mesh = make(net()), init_device_mesh("cpu", (1,))
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh)
        found = gradients(model)
        return [gradient.to_local() for gradient in found]


@case("wrap", "`fully_shard` on a bare `nn.Linear`, two steps")
def _(make: Maker) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_process():
        model = make(net().head)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(data())
            out.square().mean().backward()
            optimizer.step()
        return out


@case("wrap", "`fully_shard` with `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`")
def _(make: Maker) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with one_process():
        model, mesh = make(net()), init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model(data()).float().square().mean().backward()
        return [p.grad.to_local() for p in model.parameters()]


@case("wrap", "`parallelize_module` (tensor parallelism)")
def _(make: Maker) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with one_process():
        layers = {"first.up": ColwiseParallel(), "first.down": RowwiseParallel()}
        return parallelize_module(make(net()), init_device_mesh("cpu", (1,)), layers)(data())


@case("wrap", "a framework that replaces `model.forward`")
def _(make: Maker) -> Outcome:
    model = make(net())
    before = model.forward
    model.forward = lambda *args, **kwargs: before(*args, **kwargs).float()
    return gradients(model)


@case("wrap", "two models in one loss")
def _(make: Maker) -> Outcome:
    one, two = make(net()), make(net(seed=1))
    (one(data()) * two(data())).mean().backward()
    return [p.grad for model in (one, two) for p in model.parameters()]


# --- Parameters ---


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


@case("parameters", "`p.data.copy_()` in evaluation")
def _(make: Maker) -> Outcome:
    model = called(make).eval()
    model(data())
    for p, other in zip(model.parameters(), net(seed=2).parameters(), strict=True):
        p.data.copy_(other)
    return model(data())


@case("parameters", "a step by hand through `p.data`, gradients zeroed in place")
def _(make: Maker) -> Outcome:
    model = make(net())
    model(data()).square().mean().backward()
    for p in model.parameters():
        p.data -= 1.0 * p.grad
        p.grad.zero_()
    model(data()).square().mean().backward()
    return [p.grad for p in model.parameters()]


@case("parameters", "`model.to(torch.bfloat16)` after wrapping")
def _(make: Maker) -> Outcome:
    return make(net()).to(torch.bfloat16)(data().bfloat16()).float()


@case("parameters", "`model.to(torch.bfloat16)` after the first call")
def _(make: Maker) -> Outcome:
    return called(make).to(torch.bfloat16)(data().bfloat16()).float()


@case("parameters", "a model loaded in BF16, then wrapped")
def _(make: Maker) -> Outcome:
    model = make(net().to(torch.bfloat16))
    loss = model(data().bfloat16()).float().square().mean()
    return [gradient.float() for gradient in gradients(model, loss)]


@case("parameters", "`model.half()` after the first call")
def _(make: Maker) -> Outcome:
    return called(make).half()(data().half()).float()


@case("parameters", "`model.double()` after the first call")
def _(make: Maker) -> Outcome:
    return called(make).double()(data().double()).float()


# --- Training ---


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


@case("training", "`clip_grad_norm_`")
def _(make: Maker) -> Outcome:
    model = make(net())
    model(data()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    return [p.grad for p in model.parameters()]


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


@case("training", "sequences of ten lengths")
def _(make: Maker) -> Outcome:
    model = make(net())
    return [model(data(length)) for length in range(3, 13)]


@case("training", "evaluation between steps")
def _(make: Maker) -> Outcome:
    model = called(make)
    model.eval()
    with torch.no_grad():
        evaluated = model(data())
    return [evaluated, *gradients(model.train())]


@case("training", "double backward (a gradient penalty)")
def _(make: Maker) -> Outcome:
    model, x = make(net()), data().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradients(model, slope.square().mean())

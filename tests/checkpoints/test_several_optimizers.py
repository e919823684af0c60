"""Chains of optimizers: a list, and wrappers around several, are saved by names of parameters and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qsync
from qsync.errors import FormatError, MismatchError


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.Linear(6, 6), torch.nn.LayerNorm(6))


def pair(model: torch.nn.Module, turned: bool = False) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, with a closure of one's own over neither's order."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    if turned:
        matrices, others = matrices[::-1], others[::-1]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


class Wrapper:
    """A wrapper that is no optimizer of torch's, and has a state of its own."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers, self.num_steps = optimizers, 0

    def step(self) -> None:
        self.num_steps += 1
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def state_dict(self) -> Any:
        return {"steps": self.num_steps, "each": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state: Any) -> None:
        self.num_steps = state["steps"]
        for each, own in zip(self.optimizers, state["each"], strict=True):
            each.load_state_dict(own)


class Grouped(Wrapper):
    """One that also has groups of parameters, as schedulers ask for."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]


class Named(Wrapper):
    """One whose optimizers are attributes, and whose state has them in another order."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([])
        self.muon, self.adamw = optimizers
        self.held = {"both": (self.muon, self.adamw)}

    def step(self) -> None:
        self.optimizers = [self.muon, self.adamw]
        super().step()
        self.optimizers = []

    def state_dict(self) -> Any:
        return {"adamw": self.adamw.state_dict(), "muon": self.muon.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.muon.load_state_dict(state["muon"])


class Momentum:
    """An optimizer of one's own, without groups: what it says of itself is saved as it is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.own = list(model.parameters())
        self.momentum = [torch.zeros_like(p) for p in self.own]

    @torch.no_grad()
    def step(self) -> None:
        for p, m in zip(self.own, self.momentum, strict=True):
            p.sub_(m.mul_(0.9).add_(p.grad), alpha=1e-2)

    def state_dict(self) -> Any:
        return {"momentum": {number: m for number, m in enumerate(self.momentum)}}

    def load_state_dict(self, state: Any) -> None:
        for number, m in state["momentum"].items():
            self.momentum[number].copy_(m)


MAKERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "list": pair,
    "tuple": lambda model: tuple(pair(model)),
    "wrapper": lambda model: Wrapper(pair(model)),
    "grouped": lambda model: Grouped(pair(model)),
    "attributes": lambda model: Named(pair(model)),
    "nested": lambda model: [Wrapper(pair(model))],
    "own": Momentum,
}


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            each.step()


def numbers(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_bitwise(name, steps, tmp_path):
    model, again = Net(), Net()
    optimizer, loaded = MAKERS[name](model), MAKERS[name](again)
    train(model, optimizer, steps)
    qsync.save(tmp_path / "a", model, optimizer, step=steps)
    assert qsync.load(tmp_path / "a", again, loaded).step == steps
    train(model, optimizer, 3)
    train(again, loaded, 3)
    assert torch.equal(numbers(model), numbers(again))


@pytest.mark.parametrize("wrap", [list, Wrapper, Grouped, Named])
def test_parameters_have_names_and_may_have_another_order(wrap, tmp_path):
    model, again = Net(), Net()
    optimizer, turned = wrap(pair(model)), wrap(pair(again, turned=True))
    train(model, optimizer, 3)
    qsync.save(tmp_path / "a", model, optimizer)
    assert any(
        name.endswith("/0.weight/momentum_buffer") for name in load_file(tmp_path / "a/optimizer.safetensors")
    )
    qsync.load(tmp_path / "a", again, turned)
    train(model, optimizer, 3)
    train(again, turned, 3)
    assert torch.equal(numbers(model), numbers(again))


def test_checkpoints_takes_them(tmp_path):
    model = Net()
    optimizers = pair(model)
    checkpoints = qsync.Checkpoints(tmp_path, model, optimizers, every=1)
    train(model, optimizers, 1)
    checkpoints.step()
    checkpoints.finish()
    again = Net()
    loaded = pair(again)
    assert qsync.Checkpoints(tmp_path, again, loaded, every=1).resume() == 1
    train(model, optimizers, 2)
    train(again, loaded, 2)
    assert torch.equal(numbers(model), numbers(again))


def test_another_chain_is_refused(tmp_path):
    model = Net()
    qsync.save(tmp_path / "a", model, pair(model))
    for other in (pair(model)[::-1], pair(model)[:1], torch.optim.AdamW(model.parameters())):
        with pytest.raises(
            MismatchError, match="is of Muon, AdamW with 2 groups of parameters, the optimizer is"
        ):
            qsync.load(tmp_path / "a", model, other)
    with pytest.raises(MismatchError, match="parameters that the model lacks"):
        qsync.save(tmp_path / "b", model, Wrapper(pair(Net())))
    for wrong in ([], [None], [torch.optim.SGD(model.parameters()), "adam"]):
        with pytest.raises(
            FormatError, match="optimizer must have step, state_dict, load_state_dict, or be a"
        ):
            qsync.save(tmp_path / "b", model, wrong)


def test_the_file_of_one_optimizer_is_as_it_was(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    qsync.save(tmp_path / "a", model, optimizer)
    state = json.loads((tmp_path / "a/checkpoint.json").read_text())["state"]["optimizer"]
    assert state.keys() == {"class", "state", "param_groups"} and state["class"] == "AdamW"
    assert state["state"]["0.weight"]["exp_avg"] == {"@tensor": "optimizer/state/0.weight/exp_avg"}

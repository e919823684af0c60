"""Islands: what is compiled, that it computes the same, and that it is left alone where it is slower."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import qsync
from qsync.backend.devices.device_detection import detect_class
from qsync.errors import MismatchError
from qsync.records.cluster import Cluster, Link
from qsync.runtime import islands, planned_forward
from qsync.tracing.operator_table import call_name


class Block(nn.Module):
    """A residual block with a root-mean-square norm, as language models have."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(width))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        h = nn.functional.silu(self.gate(h)) * self.up(h)
        return x + self.drop(self.down(h))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(), nn.LayerNorm(16), nn.Linear(16, 4))


def grads(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.grad = None
    y = module(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in module.parameters())]


def found(module: nn.Module) -> list[islands.Island]:
    ran = planned_forward.program_of(module).rewritten
    return [island for part in ran for island in part.modules() if isinstance(island, islands.Island)]


class NoChoices:
    """No choice of an earlier process."""

    def get(self, key: object, num_choices: int) -> None:
        """Know nothing."""

    def keep(self, key: object, number: int) -> None:
        """Keep nothing."""


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every island be compiled, whatever is faster here."""
    monkeypatch.setattr(islands, "_known", {})
    monkeypatch.setattr(islands, "_is_faster", lambda *_: True)
    monkeypatch.setattr(islands, "_choices", lambda num_threads: NoChoices())


@pytest.fixture
def _never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no island be compiled."""
    monkeypatch.setattr(islands, "_known", {})
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager)  # no waiting for g++
    monkeypatch.setattr(islands, "_is_faster", lambda *_: False)
    monkeypatch.setattr(islands, "_choices", lambda num_threads: NoChoices())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("_always")
def test_compiled_islands_compute_what_uncompiled_ones_do(precision: str) -> None:
    x = torch.randn(8, 16)
    plain, compiled = model(), model()
    qsync.wrap(plain, precision, strict=True)
    qsync.wrap(compiled, precision, strict=True, compile=True)
    expected, got = grads(plain, x), grads(compiled, x)
    assert len(found(compiled)) == 3 and all(island.is_compiled for island in found(compiled))
    tolerance = 1e-6 if precision == "fp32" else 0.02
    for a, b in zip(expected, got, strict=True):
        assert (a - b).norm() <= tolerance * a.norm()
    with torch.no_grad():
        compiled.eval(), plain.eval()
        torch.testing.assert_close(compiled(x), plain(x), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("_always")
def test_backward_twice_through_compiled_islands() -> None:
    x = torch.randn(8, 16)
    wrapped = qsync.wrap(model(), "fp32", compile=True)
    loss = wrapped(x).square().mean()
    loss.backward(retain_graph=True)
    assert any(island.is_compiled for island in found(wrapped))
    once = [parameter.grad.clone() for parameter in wrapped.parameters()]
    loss.backward()
    for parameter, first in zip(wrapped.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * first)


@pytest.mark.usefixtures("_never")
def test_islands_are_cut_at_products_and_random_numbers_under_every_assignment() -> None:
    def names(precision: str) -> list[list[str]]:
        wrapped = qsync.wrap(model(), precision, strict=True, compile=True)
        wrapped(torch.randn(8, 16))
        return [
            [call_name(node) for node in island._plain.graph.nodes if node.op.startswith("call")]
            for island in found(wrapped)
        ]

    fp32 = names("fp32")
    assert fp32 == [
        ["float", "pow", "mean", "add", "rsqrt", "mul", "mul"], ["silu", "mul"], ["add", "layer_norm"],
    ]  # fmt: skip
    for precision in ("bf16", "int8"):  # the same, but for conversions at the edges
        assert [[name for name in island if name != "to"] for island in names(precision)] == fp32


@pytest.mark.usefixtures("_never")
def test_slower_islands_run_as_before_bitwise() -> None:
    x = torch.randn(8, 16)
    plain, wrapped = (
        qsync.wrap(model(), "bf16", strict=True),
        qsync.wrap(model(), "bf16", strict=True, compile=True),
    )
    assert all(map(torch.equal, grads(plain, x), grads(wrapped, x)))
    assert found(wrapped) and not any(island.is_compiled for island in found(wrapped))


def test_a_compiler_that_fails_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no g++ here\nand much more")

    monkeypatch.setattr(islands, "_known", {})
    monkeypatch.setattr(islands, "_choices", lambda num_threads: NoChoices())
    monkeypatch.setattr(islands, "_compile", broken)
    wrapped = qsync.wrap(model(), "fp32", compile=True)
    with pytest.warns(UserWarning, match="uncompiled, because Inductor fails: no g[+][+] here$"):
        expected = grads(wrapped, torch.ones(8, 16))
    assert all(map(torch.equal, expected, grads(qsync.wrap(model(), "fp32"), torch.ones(8, 16))))


def test_a_graph_that_writes_in_place_has_no_islands() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x).tanh()
            y[:, 0] = y[:, 1].exp()
            return self.fc(y.sigmoid())

    wrapped = qsync.wrap(Writes(), "bf16", strict=True, compile=True)
    wrapped(torch.randn(4, 16))
    assert not found(wrapped)


class Modes(nn.Module):
    """Calls under several modes, between two products."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.body = [body]  # in a list, so that it is no part of the module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.body[0](self.up(x)))


def target_without_gradients(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = h * 2 + 1
    return nn.functional.gelu(h) * target + target


def target_in_inference(h: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        target = h.softmax(-1) * 2
    return nn.functional.gelu(h) * target.clone() + h


def gradients_again(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = h.tanh() * 2
        with torch.enable_grad():
            trained = nn.functional.silu(h) * target
        target = target * trained
    return trained * h + target


def norm_in_autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = nn.functional.linear(h, torch.eye(16))
        normed = nn.functional.layer_norm(nn.functional.gelu(h), (16,))
        total = torch.cat([h, normed], 1).sum(1, keepdim=True)
    return normed.float() * total.float()


@pytest.mark.parametrize(
    "body", [target_without_gradients, target_in_inference, gradients_again, norm_in_autocast]
)
@pytest.mark.usefixtures("_always")
def test_an_island_stays_under_the_mode_that_it_was_traced_in(
    body: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(islands, "_compile", lambda plain, samples: aot_eager(plain, list(samples)))
    x = torch.randn(8, 16)
    expected = grads(Modes(body), x)
    for precision, tolerance in {"fp32": 1e-6, "bf16": 0.05}.items():
        wrapped = qsync.wrap(Modes(body), precision, strict=True, compile=True)
        for got, a in zip(grads(wrapped, x), expected, strict=True):
            assert (got - a).norm() <= tolerance * a.norm()
        assert found(wrapped)


@pytest.mark.usefixtures("_always")
def test_a_profile_prices_islands_and_its_plan_runs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager)  # no waiting for g++
    net, x = model(), torch.randn(8, 16)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()

    profile = qsync.profile(net, x, loss, precisions=["fp32", "bf16"], rounds=1, compile=True)
    norm = profile.ops["1.mul#2"]
    assert profile.compiled and all(cost.forward_s > 0.0 for cost in norm.values())
    # The three products of an island share its time by what they compute.
    assert profile.ops["1.mul"]["fp32"].forward_s == pytest.approx(norm["fp32"].forward_s)
    cluster = Cluster((detect_class(torch.device("cpu")),), Link(1e9, 1e-5))
    profiles = {profile.device_class: profile}
    plan = qsync.plan(qsync.capture(net, x), profiles, qsync.sensitivity(net, [x], loss), cluster)
    plan = qsync.Plan.from_json(plan.to_json())
    with pytest.raises(MismatchError, match="profiles with compile=True"):
        qsync.wrap(copy.deepcopy(net), plan, compile=False)
    grads(qsync.wrap(net, plan), x)
    assert all(island.is_compiled for island in found(net))

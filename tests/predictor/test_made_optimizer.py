"""What `make_optimizer` makes: lists and wrappers step, what they keep counts, errors are one sentence."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import qsync
from qsync.errors import CalibrationError
from qsync.predictor.profiling.made_optimizer import made, state_bytes


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def muon_and_adamw(parameters):
    return [
        torch.optim.Muon([p for p in parameters if p.ndim == 2]),
        torch.optim.AdamW([p for p in parameters if p.ndim != 2]),
    ]


class Wrapper:
    """A wrapper of several, without groups of parameters, whose `zero_grad` takes nothing."""

    def __init__(self, optimizers) -> None:
        self.optimizers = {"both": tuple(optimizers)}

    def step(self) -> None:
        for each in self.optimizers["both"]:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers["both"]:
            each.zero_grad()


class Flat:
    """An optimizer of one's own that keeps one buffer for all parameters, and views of it for each."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)
        self.buffer = torch.zeros(sum(p.numel() for p in self.parameters))
        self.views = list(self.buffer.split([p.numel() for p in self.parameters]))

    @torch.no_grad()
    def step(self) -> None:
        for p, view in zip(self.parameters, self.views, strict=True):
            p.sub_(view.add_(p.grad.flatten()).view_as(p), alpha=1e-3)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


MATRICES, REST = 2 * 64 * 4, 2 * 8 * 4
# Muon keeps one tensor a matrix, AdamW two and the number of steps.
KEPT = MATRICES + 2 * REST + 2 * 4


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (torch.optim.AdamW, 2 * (MATRICES + REST) + 4 * 4),
        (torch.optim.SGD, 0),
        (muon_and_adamw, KEPT),
        (lambda parameters: tuple(muon_and_adamw(parameters)), KEPT),
        (lambda parameters: Wrapper(muon_and_adamw(parameters)), KEPT),
        (Flat, MATRICES + REST),
    ],
)
def test_a_profile_counts_what_they_keep(make, kept):
    profile = qsync.profile(
        layers(), torch.randn(4, 8), lambda model, batch: model(batch).square().mean(), precisions=["fp32"],
        rounds=1, make_optimizer=make,
    )  # fmt: skip
    assert profile.optimizer_bytes == kept and profile.optimizer_s > 0.0
    # Of Flat nobody says whose its buffer is.
    assert sum(profile.state_bytes.values()) == (kept if make is not Flat else 0)
    if make is torch.optim.AdamW:
        assert profile.state_bytes == {
            f"{layer}.{name}": 2 * 4 * num + 4
            for layer in (0, 1)
            for name, num in (("weight", 64), ("bias", 8))
        }


WIDE = 512


@pytest.mark.parametrize(
    ("make", "workspace"),
    [
        (torch.optim.AdamW, 2 * 4 * WIDE * WIDE),  # beside its largest parameter
        (partial(torch.optim.AdamW, foreach=True), 4 * (WIDE * WIDE + WIDE)),  # beside all at once
        (partial(torch.optim.SGD, lr=0.1), 0),
    ],
)
def test_a_profile_measures_what_a_step_has_in_use_beside_the_state(make, workspace):
    profile = qsync.profile(
        torch.nn.Linear(WIDE, WIDE), torch.randn(2, WIDE), lambda model, batch: model(batch).square().mean(),
        precisions=["fp32"], rounds=1, make_optimizer=make,
    )  # fmt: skip
    assert profile.optimizer_workspace_bytes == pytest.approx(workspace, rel=0.01, abs=256)


def test_what_is_not_its_own_does_not_count():
    model = layers()
    parameters = list(model.parameters())
    optimizer = made(Flat, parameters)
    optimizer.model, optimizer.gradients = model, [torch.zeros_like(p) for p in parameters]
    for p, gradient in zip(parameters, optimizer.gradients, strict=True):
        p.grad = gradient
    assert state_bytes(optimizer, parameters) == MATRICES + REST


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise AssertionError("no process group")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            torch.optim.Muon,
            r"make_optimizer failed \(ValueError: Muon only supports 2D .* a list of",
        ),
        (lambda parameters: [], r"make_optimizer made \[\]; give a function that returns an optimizer"),
        (lambda parameters: [None], r"make_optimizer made \[None\]; give a function"),
        (lambda parameters, other: None, "make_optimizer failed .TypeError: .*'other'"),
        (
            partial(Failing, lr=0.1),
            "a step of make_optimizer's Failing failed .no process group",
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence(make, words):
    with pytest.raises(CalibrationError, match=words):
        qsync.profile(
            layers(), torch.randn(4, 8), lambda model, batch: model(batch).square().mean(),
            precisions=["fp32"], rounds=1, make_optimizer=make,
        )  # fmt: skip

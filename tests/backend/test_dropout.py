"""Dropout that draws torch's random numbers: the same bits, and the same state of the generator after."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import qsync
from qsync.backend.casts import compiled_casts
from qsync.backend.kernels import dropout as kernel
from qsync.backend.kernels.dropout import draw_kept, dropout

NUM = kernel._MIN_ELEMENTS
ODD = [0, 1, 2, 311, 622, 623, 624]  # words drawn before
SIZES = [NUM, NUM + 1, NUM + 311, NUM + 312]


def after(words, run):
    """The result of a run after so many draws of one word, and a draw after it."""
    torch.manual_seed(words)
    torch.empty(words, dtype=torch.int32).random_()
    return run(), torch.rand(3), torch.get_rng_state()


def same(ours, theirs):
    (result, *left), (expected, *expected_left) = ours, theirs
    assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(expected))
    assert torch.equal(result.isnan(), expected.isnan())
    assert all(torch.equal(a, b) for a, b in zip(left, expected_left, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("words", ODD)
def test_the_result_and_the_gradient_are_torch_s_to_the_bit(words, size, dtype):
    x = torch.linspace(-3, 3, size).to(dtype).requires_grad_()
    g = torch.linspace(1, 2, size).to(dtype)
    for p in (0.1, 0.25, 1 / 3, 0.9, 1e-9):
        ours = after(words, lambda p=p: dropout(F.dropout, x, p))
        same(ours, after(words, lambda p=p: F.dropout(x, p)))
    ours, theirs = (
        after(words, lambda f=f: torch.autograd.grad(f(x), x, g)[0])
        for f in (lambda x: dropout(F.dropout, x, 0.1), lambda x: F.dropout(x, 0.1))
    )
    same(ours, theirs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("words", ODD)
def test_the_kept_bytes_are_torch_s(words, size):
    ours = after(words, lambda: draw_kept((1, size), 0.1, torch.device("cpu")))
    same(ours, after(words, lambda: torch.empty(1, size, dtype=torch.uint8).bernoulli_(0.9)))


def test_the_compiled_program_runs_where_torch_draws_one_by_one():
    """Serial draws take two words each, and so new blocks of words; MKL's take one word in all."""
    torch.manual_seed(0)
    before = torch.get_rng_state().view(torch.int64)[3:627].clone()
    torch.empty(NUM).bernoulli_(0.5)
    is_serial = not torch.equal(before, torch.get_rng_state().view(torch.int64)[3:627])
    if not is_serial or compiled_casts.library() is None:
        pytest.skip("torch draws by MKL, or nothing is compiled here")
    assert kernel._library(torch.ones(NUM)) is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (F.dropout, x.t(), 0.1),
        lambda x: (F.dropout, x.double(), 0.1),
        lambda x: (F.dropout, x, 0.0),
        lambda x: (F.dropout, x, 1.0),
        lambda x: (F.dropout, x, 0.1, False),
        lambda x: (torch.dropout, x, 0.1, True),
        lambda x: (F.dropout, x.clone(), 0.1, True, True),
        lambda x: (F.dropout, x.view(-1)[3 : NUM + 3], 0.1),
        lambda x: (F.dropout, x[:2], 0.1),
    ],
    ids=["transposed", "double", "none", "all", "evaluation", "torch", "in place", "unaligned", "small"],
)
def test_every_call_gives_what_torch_gives(make):
    x = torch.randn(64, NUM // 32)
    target, *arguments = make(x)
    ours = after(1, lambda: dropout(*make(x)))
    same(ours, after(1, lambda: target(*arguments)))


def test_nan_and_inf_go_through_dropout_as_in_torch():
    x = torch.full((NUM,), float("inf"))
    x[::2] = float("nan")
    same(after(0, lambda: dropout(F.dropout, x, 0.5)), after(0, lambda: F.dropout(x, 0.5)))


def test_a_wrapped_model_calls_it_and_drops_what_torch_drops(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel, "_draw", lambda *a, real=kernel._draw: (calls.append(1), real(*a))[1])
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.25), torch.nn.Linear(256, 8))
    x = torch.randn(64, 64)
    wrapped = qsync.wrap(copy.deepcopy(model), "int8", strict=True)
    dropped = []
    for one in (model, wrapped):
        torch.manual_seed(3)
        one(x)
        dropped.append(torch.get_rng_state())
    assert torch.equal(*dropped)
    assert bool(calls) == (kernel._library(torch.ones(NUM)) is not None)
    fp32 = qsync.wrap(copy.deepcopy(model), "fp32", bitwise=True, strict=True)
    for one in (model, fp32):
        torch.manual_seed(3)
        one.zero_grad()
        one(x).square().sum().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), fp32.parameters(), strict=True)
    )

"""On a GPU a lowered step queues its work and waits for nothing; counted without one (gpu_kernels.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_kernels import Waits, pretend_gpu
from torch import nn

import qsync
from qsync.backend.casts import cast_ops
from qsync.backend.compressed_saves.deferred_flags import deferred_flag
from qsync.backend.compressed_saves.saved_ops import saving
from qsync.backend.selection import kernel_selection
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision
from qsync.operators.registry import FORMS, PRECISIONS_BY_KIND

PRODUCTS = [(kind, p) for kind, precisions in PRECISIONS_BY_KIND.items() for p in precisions]


@pytest.fixture(params=["torch", "cutlass"])
def kernels(request, monkeypatch):
    return pretend_gpu(monkeypatch, 0 if request.param == "torch" else -1)


def test_a_wait_is_seen():
    x = torch.randn(4)
    for wait in (x.sum().item, lambda: bool(x.any()), lambda: x[x > 0], x.nonzero, lambda: torch.equal(x, x)):
        with Waits() as waits:
            wait()
        assert waits.found
    with Waits() as waits:
        (x * 2.0 + torch.ones(()))[torch.tensor([1, 2])].cumsum(0)
    assert not waits.found


@pytest.mark.parametrize(("kind", "precision"), PRODUCTS)
def test_no_kernel_waits(kernels, kind, precision, monkeypatch):
    bmm = torch.bmm  # on CPUs without out_dtype
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype=None: bmm(a, b).to(out_dtype or a.dtype))
    try:
        kernel = kernels.kernel(kind, precision)
    except UnsupportedError as error:
        assert precision in (Precision.INT8, Precision.INT8_ALL, Precision.MXFP8)  # an H100 has no MXFP8
        pytest.skip(str(error))
    run = kernel_selection._trial(kind, precision, kernel, torch.device("cpu"), small=True)
    run()  # makes the gradient
    with Waits() as waits:
        run()
    assert waits.found == []


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, form) for kind, forms in FORMS.items() for form in dict.fromkeys(forms) if form != "plain"],
)
def test_no_operator_that_saves_less_waits(kernels, kind, form):
    x = torch.randn(6, 5, 8, 8, requires_grad=True)
    weight, bias = (torch.randn(size, requires_grad=True) for size in (8, 8))
    calls = {
        "layer_norm": (F.layer_norm, (x, (8,), weight, bias)),
        "batch_norm": (F.batch_norm, (x, None, None, weight[:5], bias[:5], True)),
        "softmax": (F.softmax, (x, -1)),
    }
    target, args = calls.get(kind, (getattr(F, kind, None) or getattr(torch, kind), (x,)))
    for step in range(3):  # the second takes the answer of the first
        with Waits() as waits:
            saving(kind, form)(target, *args).sum().backward()
        assert waits.found == [] or step == 0  # tables are made once
        with torch.no_grad():
            weight.add_(1.0)


class Block(nn.Module):
    """Attention, norms, an embedding, a convolution and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(64, 32), nn.Conv2d(3, 8, 3, padding=1)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.images, self.head = nn.BatchNorm2d(8), nn.Linear(32, 64)

    def forward(self, tokens, images):
        x = self.norm(self.table(tokens))
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)
        x = x + F.relu(self.images(self.conv(images))).mean((1, 2, 3))[:, None, None]
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.filterwarnings("ignore:.*conv2d in int8_all")  # which GPUs compute in int8
@pytest.mark.parametrize(
    ("mode", "save_less"),
    [
        *((mode, False) for mode in ("bf16", "fp16", "tf32", "int8", "int8_all", "fp8")),
        *((mode, True) for mode in ("bf16", "int8_all")),
        *(pytest.param(mode, True, marks=pytest.mark.deep) for mode in ("fp16", "tf32", "int8", "fp8")),
    ],
)
def test_no_step_waits(kernels, mode, save_less):
    model = Block()
    qsync.wrap(model, mode, save_less=save_less, strict=True)
    tokens, images = torch.zeros(4, 16, dtype=torch.long), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step() -> None:
        model(tokens, images).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # traces the model
    with Waits() as waits:
        step()
        step()
    assert waits.found == []


def test_an_answer_is_about_the_weights_of_the_step_before(kernels):
    weight, asked = torch.ones(4), []

    def ask() -> torch.Tensor:
        asked.append(weight.clone())
        return weight.amin() > 0

    def answers() -> tuple[bool, bool]:
        return deferred_flag(weight, ask), deferred_flag(weight, ask)

    assert answers() == (False, False) and len(asked) == 1  # none has come yet
    weight.sub_(2.0)
    assert answers() == (True, True)  # of the ones
    weight.add_(2.0)
    assert answers() == (False, False) and len(asked) == 3


def test_what_is_recorded_to_be_repeated_asks_nothing(kernels, monkeypatch):
    weight = torch.ones(4)
    deferred_flag(weight, lambda: weight.amin() > 0)
    weight.mul_(2.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not deferred_flag(weight, pytest.fail)


def test_a_recorded_graph_draws_anew_in_each_replay(kernels, monkeypatch):
    """A seed that the host drew would be part of the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cast_ops, "_seed", pytest.fail)
    values, ones = torch.randn(64, 32), torch.ones(64)
    for round_codes, factors in ((cast_ops.round_rows, ones[:32]), (cast_ops.round_columns, ones)):
        first, second = (round_codes(values, factors)[0] for _ in range(2))
        assert not torch.equal(first, second)

"""A call that raises an error raises torch's own, and leaves the model lowered."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.errors import TracingError
from qsync.runtime.planned_forward import program_of


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        mask = torch.zeros(5, 5, dtype=torch.bool)
        return self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Judges(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return F.cross_entropy(self.fc(x), torch.zeros(6, dtype=torch.long))


class Watches(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, x, watched=False):
        if watched:
            with warnings.catch_warnings():
                for row in x:
                    if row.sum().item() > 1e9:
                        x = x + 1
        return F.linear(x, self.weight)


CALLS = {
    "attention": (Attends, (2, 5, 32), (2, 6, 32)),
    "a layer of torch": (lambda: nn.LSTM(16, 16), (4, 2, 16), (4, 2, 15)),
    "a recurrence": (Recurs, (4, 2, 16), (4, 2, 15)),
    "a linear layer": (lambda: nn.Linear(32, 48), (4, 32), (4, 31)),
    "a convolution": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8), (2, 4, 8, 8)),
    "an image smaller than its window": (lambda: nn.Conv2d(3, 8, 5), (2, 3, 8, 8), (2, 3, 4, 4)),
    "a loss": (Judges, (6, 8), (5, 8)),
}


@pytest.mark.filterwarnings("ignore:qsync. .* of . products")
@pytest.mark.parametrize(("order", "precision"), [
    ("good bad good good", "bf16"),
    ("bad bad good bad good", "fp32"),
    pytest.param("good bad good good", "fp32", marks=pytest.mark.deep),
    pytest.param("bad bad good bad good", "bf16", marks=pytest.mark.deep),
])  # fmt: skip
@pytest.mark.parametrize("call", CALLS)
def test_an_error_is_torch_s_and_the_next_call_is_lowered(call, order, precision):
    torch._dynamo.reset()
    make, good, bad = CALLS[call]
    model = qsync.wrap(make(), precision, strict=True)
    whole = qsync.capture(make(), torch.randn(good))
    for kind in order.split():
        if kind == "good":
            model(torch.randn(good))
            (lowered,) = program_of(model).lowered
            assert [op.name for op in lowered.graph.adjustable] == [op.name for op in whole.adjustable]
            continue
        x = torch.randn(bad)
        with pytest.raises(Exception) as expected:
            make()(x)
        with pytest.raises(type(expected.value)) as found:
            model(x)
        assert str(found.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore:qsync. .* of . products")
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_a_call_in_torch_func_is_refused_and_the_next_one_is_lowered(transform):
    torch._dynamo.reset()
    model, x = qsync.wrap(nn.Sequential(nn.Linear(32, 48)), "bf16", strict=True), torch.randn(4, 32)
    before = model(x)

    with pytest.raises(TracingError, match=f"torch.func.{transform.__name__} is around it"):
        transform(lambda given: model(given).square().mean())(x)

    assert torch.equal(model(x), before)


def test_a_later_call_that_ends_the_lowering_says_so():
    torch._dynamo.reset()
    model, x = qsync.wrap(Watches(), "bf16", strict=True), torch.randn(4, 32)
    model(x)

    with pytest.warns(UserWarning, match="0 of 0 products in bf16; see"):
        model(x, watched=True)
    assert "of code that torch.compile gives up only layers are lowered" in str(qsync.coverage(model))

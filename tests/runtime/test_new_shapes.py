"""Calls after the plan was made: shapes without a kernel, many lengths, code that is not traced."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync import Precision, backend
from qsync.backend.encoding import Operand
from qsync.backend.selection.kernel_selection import Kernels
from qsync.errors import UnsupportedError
from qsync.runtime.planned_forward import program_of
from qsync.tracing.tracer import dynamo_settings

INT8, CPU = Precision.INT8, backend.select("cpu")


class Mixer(nn.Module):
    """Products of every kind, on sequences of any length."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 5)
        self.signal = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, ids):
        x = self.signal(self.table(ids).mT).mT
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v) + torch.matmul(q, k.mT).softmax(-1) @ v
        return self.out(F.gelu(x.transpose(1, 2).flatten(2)))


def gradients(model, *inputs):
    """Return the result and the gradients of a step, in one vector each."""
    model.zero_grad()
    found = model(*inputs)
    found.square().sum().backward()
    given = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found.detach().flatten(), torch.cat(given)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int8_all"])
def test_a_last_batch_of_any_shape_runs_as_planned(precision):
    torch.manual_seed(0)
    model = Mixer()
    low = qsync.wrap(copy.deepcopy(model), precision, strict=True)
    for shape in ((4, 8), (3, 8), (0, 8), (1, 1), (3, 7)):
        ids = torch.randint(11, shape)
        for found, expected in zip(gradients(low, ids), gradients(model, ids), strict=True):
            assert (found - expected).norm() <= 0.1 * expected.norm()
        assert Precision.FP32 not in program_of(low).assignment().values() or precision == "fp32"


def test_a_trace_after_the_first_call_is_shown_while_it_lasts(capsys):
    class Untraced(nn.Linear):  # torch remembers what it has traced by the code of forward
        def forward(self, x):
            return super().forward(x)

    model = qsync.wrap(Untraced(8, 8), "bf16", strict=True)
    shown = []
    for size in (4, 3, 5):
        model(torch.randn(size, 8))
        shown.append(capsys.readouterr().err.count("qsync: tracing Untraced anew"))
    assert shown == [0, 1, 0]


class Reader(nn.Module):
    """A linear layer on sequences, as a transformer's."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 11)

    def forward(self, ids):
        return self.out(self.norm(self.table(ids)))


def test_lengths_after_the_second_are_not_traced_again():
    model = qsync.wrap(Reader(), "bf16", strict=True)
    torch._dynamo.utils.counters.clear()
    for length in (13, 11, 10, 12, 9, 8):
        model(torch.randint(11, (3, length))).square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


class Noting(nn.Module):
    """A model that appends to a list in every call."""

    def __init__(self):
        super().__init__()
        self.fc, self.means = nn.Linear(8, 8), []

    def forward(self, x):
        y = self.fc(x)
        self.means.append(y.detach().mean())
        return y


def test_state_that_changes_at_every_call_is_named_and_more_shapes_are_not_blamed():
    model = qsync.wrap(Noting(), "bf16", strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            model(torch.randn(2, 8))
    said = [str(one.message) for one in caught if "traced" in str(one.message)]
    assert len(said) == 1 and "8 times for the same shapes: Python state" in said[0]
    assert len(model.means) == 10


class OnlyEvenRows(Kernels):
    """The CPU's kernels, of which those of linear layers in INT8 want an even number of rows."""

    sixteen_bit = "bf16"

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self._chosen, self._unsupported = CPU._chosen, CPU._unsupported

    def kernel(self, kind, precision, reference=False):
        found = super().kernel(kind, precision, reference)

        def picky(target, out_type, *args, **kwargs):
            if kind == "linear" and isinstance(args[0], Operand) and len(args[0].value) % 2:
                raise UnsupportedError("an odd number of rows has no kernel")
            return found(target, out_type, *args, **kwargs)

        return picky


def test_a_call_that_a_kernel_does_not_support_runs_one_precision_up_and_says_so(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    bf16 = qsync.wrap(copy.deepcopy(model), "bf16", strict=True)
    monkeypatch.setattr(backend, "select", lambda *_: OnlyEvenRows())
    low = qsync.wrap(model, "int8", strict=True)
    gradients(low, torch.randn(4, 8))
    odd = torch.randn(5, 8)
    with pytest.warns(
        UserWarning, match="an odd number of rows has no kernel; such calls run in bf16"
    ) as said:
        found = gradients(low, odd)
    assert len(said) == 2  # one of each layer
    for got, expected in zip(found, gradients(bf16, odd), strict=True):
        assert (got - expected).norm() <= 0.01 * expected.norm()
    gradients(low, torch.randn(7, 8))  # said once: a second warning would be an error here


class Positions(nn.Module):
    """Specialized by its length: torch traces it anew for each."""

    def __init__(self):
        super().__init__()
        self.of_length = {length: torch.randn(length, 16) for length in range(1, 70)}
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x + self.of_length[x.shape[1]]).tanh()


def test_sixty_lengths_train_as_planned_and_many_traces_are_said_once():
    torch.manual_seed(0)
    model = Positions()
    low = qsync.wrap(copy.deepcopy(model), "int8", strict=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in range(2, 62):
            x = torch.randn(2, length, 16)
            for found, expected in zip(gradients(low, x), gradients(model, x), strict=True):
                error = ((found - expected).norm() / expected.norm()).item()
                assert 0 < error < 0.2  # FP32 would be exact
            assert program_of(low).assignment() == {"fc": INT8}
    texts = [str(warning.message) for warning in said if "traced" in str(warning.message)]
    assert len(texts) == 1 and "pad batches to a few lengths" in texts[0]
    with dynamo_settings():
        assert torch._dynamo.config.recompile_limit > 10**9  # torch runs the plain model past it


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x).tanh()


def past_the_limit():
    """Let a torch.compile of a user's meet its limit at the class of a model that is wrapped elsewhere."""
    other = torch.compile(Head(), backend="eager", dynamic=False)
    for rows in range(2, 3 + torch._dynamo.config.recompile_limit):
        with torch.no_grad():
            other(torch.randn(rows, 16))


def test_the_recompile_limit_of_another_compile_is_said_and_precision_comes_back():
    torch.manual_seed(0)
    model = Head()
    low = qsync.wrap(copy.deepcopy(model), "int8", strict=True)
    x = torch.randn(4, 16)
    assert not torch.equal(low(x), model(x))
    past_the_limit()
    wide, found = torch.randn(2, 3, 16), []
    with pytest.warns(UserWarning, match="ran in FP32: another torch.compile of its class met"):
        found.append(torch.equal(low(wide), model(wide)))
    found += [torch.equal(low(each), model(each)) for each in (wide, x, torch.randn(5, 2, 2, 16))]
    assert found == [True, False, False, False]
    assert program_of(low).assignment() == {"fc": INT8}


def test_a_model_wrapped_past_the_recompile_limit_is_traced():
    past_the_limit()
    model = Head()
    low = qsync.wrap(copy.deepcopy(model), "int8", strict=True)
    x = torch.randn(4, 16)
    assert not torch.equal(low(x), model(x)) and program_of(low).assignment() == {"fc": INT8}

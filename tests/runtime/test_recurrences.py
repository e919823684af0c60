"""Recurrences: one operator of all layers, in FP32 as torch runs it, and in BF16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

import qsync
from qsync import Precision
from qsync.lowering.incremental import lower
from qsync.predictor.memory.peak import peak_memory
from qsync.runtime.planned_forward import program_of
from tests.support.kernel_calls import agreement_db

CALLS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"batch_first": True, "bias": False}),
    (nn.LSTM, {"proj_size": 4}),
    (nn.LSTM, {"num_layers": 2, "dropout": 0.5}),
    (nn.GRU, {"num_layers": 2, "batch_first": True}),
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
]
X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(1))


class Recurrent(nn.Module):
    """Return the results of a linear layer on a recurrence, and the last state."""

    def __init__(self, kind: type[nn.RNNBase], options: dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(8, 16, **options)
        width = self.rnn.proj_size or self.rnn.hidden_size
        self.fc = nn.Linear(width * (1 + self.rnn.bidirectional), 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.rnn(x)
        return self.fc(y), state[0] if isinstance(state, tuple) else state


def step(model):
    """Return the results, and the gradients of input and parameters."""
    torch.manual_seed(3)
    x = X.clone().requires_grad_()
    y, state = model(x)
    (y.square().sum() + state.square().sum()).backward()
    return [y.detach(), state.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("kind", "options"), CALLS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrences_run_in_fp32_as_torch_runs_them_and_in_bf16(kind, options):
    expected = step(Recurrent(kind, options))
    assert all(map(torch.equal, step(qsync.wrap(Recurrent(kind, options), "fp32", bitwise=True)), expected))
    low = qsync.wrap(Recurrent(kind, options), "bf16", strict=True)
    found = step(low)
    assert [tensor.dtype for tensor in found] == [torch.float32] * len(found)
    assert all(agreement_db(a, b) > 30 for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], expected[0])
    program = program_of(low)
    assert program.assignment() == {"rnn": Precision.BF16, "fc": Precision.BF16}


def test_a_state_that_is_given_is_an_operand():
    class Continued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.first = nn.GRU(8, 16), nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.rnn(x, self.first.expand(-1, x.shape[1], -1).contiguous())

    expected, found = step(Continued()), step(qsync.wrap(Continued(), "bf16", strict=True))
    assert all(agreement_db(a, b) > 30 for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[-1], expected[-1])


def test_packed_sequences_stay_as_torch_runs_them():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.fc = nn.LSTM(8, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            return self.fc(pad_packed_sequence(self.rnn(packed)[0])[0])

    lengths = torch.tensor([5, 3, 1, 2, 4, 5])
    model = Packed()
    expected = model(X, lengths)
    found = qsync.wrap(copy.deepcopy(model), "bf16", strict=True)(X, lengths)
    assert found.shape == expected.shape and agreement_db(found, expected) > 35
    assert torch.equal(qsync.wrap(model, "fp32", bitwise=True)(X, lengths), expected)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_the_products_of_all_layers_and_steps_are_counted(options):
    model = Recurrent(nn.LSTM, options)
    with FlopCounterMode(display=False) as counter:
        model.to("meta")(X.to("meta"))
    graph = qsync.capture(Recurrent(nn.LSTM, options), X)
    assert sum(op.flops for op in graph.ops) == counter.get_total_flops()


@pytest.mark.parametrize(("kind", "options"), [CALLS[1], CALLS[5]])
def test_the_sensitivity_of_a_recurrence_is_near_what_is_measured(kind, options):
    def loss_fn(model, x):
        y, state = model(x)
        return y.square().mean() + state.square().mean()

    def of(indicator):
        found = qsync.sensitivity(
            Recurrent(kind, options), [X], loss_fn, indicator=indicator, precisions=["bf16"]
        )
        return found.omega["rnn"]["bf16"]

    # Roundings of the states between steps are inside of the operator: the estimate knows the last of them.
    assert 0.1 < of("variance") / of("empirical") < 10


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_memory_model_knows_what_a_recurrence_saves(kind, precision, fast_products):
    torch.manual_seed(0)
    model = nn.Sequential(kind(128, 256, 2), First(), nn.Linear(256, 8))
    x, saved = torch.randn(20, 8, 128), {}
    graph = qsync.capture(model, x)
    assignment = {op.name: precision for op in graph.adjustable}
    memory = peak_memory(lower(graph, assignment))
    low = qsync.wrap(model, precision, strict=True)
    low(x)  # kernels are timed at the first call
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = low(x)
    found = sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in given)
    assert y.requires_grad
    assert memory.saved + memory.casts == pytest.approx(found, rel=0.25)


class First(nn.Module):
    """Return the sequence, without the state."""

    def forward(self, results):
        return results[0]

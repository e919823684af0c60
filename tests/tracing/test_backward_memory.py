"""What torch's derivative of a call needs for a while, against what torch allocates."""

import pytest
import torch
import torch.nn.functional as F

import qsync
from qsync.experiments.harness.measured_memory import step_peak_bytes
from qsync.lowering.incremental import lower
from qsync.predictor.memory.peak import peak_memory
from qsync.records.precision import Precision

ROWS, WIDTH = 512, 256
BYTES = 4 * ROWS * WIDTH


class Between(torch.nn.Module):
    """A call between two linear layers; it is what takes most memory."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.first, self.last = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.last(self.call(self.first(x)))


# By how many tensors of the call's size the derivative needs.
CALLS = {
    "relu": (F.relu, 0), "gelu": (F.gelu, 0), "mish": (F.mish, 0), "elu": (F.elu, 0), "abs": (torch.abs, 1),
    "square": (torch.square, 2), "pow": (lambda x: x**3, 2), "sin": (torch.sin, 1), "atan": (torch.atan, 2),
    "erf": (torch.erf, 4), "cumsum": (lambda x: x.cumsum(-1), 2), "double": (lambda x: x * x, 0),
    "rms_norm": (lambda x: F.rms_norm(x, (WIDTH,)), 3), "glu": (lambda x: F.glu(torch.cat([x, x], -1)), 0),
    "reciprocal": (lambda x: 1 / x, 2), "centred": (lambda x: x - x.mean(-1, keepdim=True), 1),
}  # fmt: skip


def captured(call):
    torch.manual_seed(0)
    model = Between(call)
    return model, qsync.capture(model, torch.randn(ROWS, 8))


@pytest.mark.parametrize("name", CALLS)
def test_it_is_counted_by_what_torch_s_derivative_makes(name):
    call, tensors = CALLS[name]
    _, graph = captured(call)
    assert sum(op.backward_bytes for op in graph.ops) == tensors * BYTES


@pytest.mark.parametrize("name", [*CALLS, "norm", "variance"])
def test_the_peak_is_what_torch_allocates(name):
    norms = {
        "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
        "variance": lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6),
    }
    model, graph = captured(norms[name] if name in norms else CALLS[name][0])
    x = torch.randn(ROWS, 8)

    def step():
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad.zero_()

    step()  # the gradients stay from now on
    lowered = lower(graph, {})
    held = sum(parameter.nbytes for parameter in model.parameters())
    measured = step_peak_bytes(step, torch.device("cpu")) + 2 * held + x.nbytes
    assert peak_memory(lowered).estimate_bytes == pytest.approx(measured, rel=0.02)


def test_in_bf16_it_is_half_but_where_torch_computes_in_fp32():
    both = dict.fromkeys(("first", "last"), Precision.BF16)
    peaks = {}
    for name in ("abs", "pow", "rms_norm"):
        _, graph = captured(CALLS[name][0])
        peaks[name] = peak_memory(lower(graph, both)).estimate_bytes
    assert peaks["pow"] - peaks["abs"] == pytest.approx(BYTES / 2, rel=0.01)
    assert peaks["rms_norm"] - peaks["pow"] > 2.9 * BYTES


def test_what_cannot_run_without_numbers_counts_nothing():
    _, graph = captured(lambda x: x * x.detach().nonzero().float().mean())
    assert all(op.backward_bytes == 0 for op in graph.ops)

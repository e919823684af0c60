"""What torch's derivative of a call saves and needs, against what torch allocates."""

import pytest
import torch
import torch.nn.functional as F

import qsync
from qsync.experiments.harness.measured_memory import step_peak_bytes
from qsync.lowering.incremental import lower
from qsync.operators.precision import Precision
from qsync.predictor.memory.layout import layout
from qsync.predictor.memory.peak import peak_memory
from qsync.records.graph import Derivative

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
    assert sum(op.derivative.workspace_bytes for op in graph.ops if op.derivative) == tensors * BYTES


# What of its operand and result a call saves, and the type and share of what else.
SAVES = {
    "relu": (F.relu, False, True, []), "gelu": (F.gelu, True, False, []), "abs": (torch.abs, True, False, []),
    "softsign": (F.softsign, True, False, [("fp32", 1)]),
    "sort": (lambda x: x.sort(-1)[0], False, False, [("int64", 1)]),
    "topk": (lambda x: x.topk(WIDTH // 2, -1)[0].repeat(1, 2), False, False, [("int64", 1 / 2)]),
    "twice": (lambda x: x * 2, False, False, []), "quotient": (lambda x: 2 / x, False, False, [("fp32", 1)]),
    "log_sigmoid": (F.logsigmoid, True, False, [("fp32", 1)]),
    "reflect": (lambda x: F.pad(x, (1, 1), "reflect")[:, 1:-1], True, False, []),
    "pool": (lambda x: F.max_pool1d(x, 3, 1, 1), True, False, [("int64", 1)]),
    "mean": (lambda x: x - F.adaptive_avg_pool1d(x[:, None], 1)[:, 0], False, False, []),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVES)
def test_what_it_saves_is_counted(name):
    call, operand, result, besides = SAVES[name]
    _, graph = captured(call)
    found = [op.derivative for op in graph.ops if op.derivative and op.derivative != Derivative()]
    assert any(one.saved == (0,) for one in found) == operand
    assert any(one.saves_result for one in found) == result
    counted = [(kind, elements / (ROWS * WIDTH)) for one in found for kind, elements in one.besides]
    assert [entry for entry in counted if entry[1] > 0.1] == besides


def test_an_operand_that_is_kept_as_it_is_has_its_place_behind_those_computed_on():
    _, graph = captured(lambda x: torch.where(x > 0, x, 2 * x))
    (where,) = (op for op in graph.ops if op.kind == "where")
    names = (*where.inputs, *where.kept)
    assert [graph_dtype(graph, names[k]) for k in where.derivative.saved] == ["bool"]


def graph_dtype(graph, name):
    return next(op.dtype for op in graph.ops if op.name == name)


BETWEEN = {
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "variance": lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6),
    "responses": lambda x: F.local_response_norm(x.view(ROWS, 4, -1), 3).flatten(1),
    "instances": lambda x: F.instance_norm(x.view(ROWS, 4, -1)).flatten(1),
    "gathered": lambda x: x.gather(-1, torch.arange(WIDTH).expand(ROWS, WIDTH)),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.5),
    "gate": lambda x: torch.cat([(lambda a, b: a * b.sigmoid())(*x.chunk(2, -1))] * 2, -1),
    "slices": lambda x: torch.cat([2 * x[:, : WIDTH // 2], 3 * x[:, WIDTH // 2 :]], -1),
    "outer": lambda x: (x[:, :16, None] * x[:, None, :16]).flatten(1),
    "of_elements": lambda x: torch.einsum("bi,bi->bi", x, x),
}


@pytest.mark.parametrize("name", [*CALLS, *(name for name in SAVES if name != "topk"), *BETWEEN])
def test_the_peak_is_what_torch_allocates(name):
    model, graph = captured(({**CALLS, **SAVES}[name][0]) if name not in BETWEEN else BETWEEN[name])
    x, lowered = torch.randn(ROWS, 8), lower(graph, {})
    qsync.wrap(model, "fp32", bitwise=True)

    def step():
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad.zero_()

    for _ in range(2):  # the gradients stay from now on
        step()
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
    assert all(op.derivative is None for op in graph.ops if "nonzero" in op.name)


class Written(torch.nn.Module):
    """Rows added up into zeros, and a part of them by the name of aten's operator."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        sums = torch.zeros_like(self.fc(x))
        sums.index_add_(0, torch.arange(3), self.fc(x))
        return torch.ops.aten.slice.Tensor(sums, 0, 0, 2).exp()


def test_what_is_written_to_later_has_no_gradient_before_and_a_part_is_a_view():
    graph = qsync.capture(Written(), torch.randn(3, 4))
    found = {op.name: op for op in graph.ops}
    assert not found["zeros_like"].requires_grad and found["index_add"].requires_grad
    assert found["index_add"].derivative.saved == (1, 2)  # not what is added to
    part = found["slice"]
    assert (part.kind, part.copies, part.requires_grad) == ("view", False, True)
    root = layout(graph).root
    assert root["slice"] == "index_add" and root["exp"] == "exp"


class Multiplying(torch.autograd.Function):
    """A product of the user's own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()), x.t().mm(gradient)


class Multiplied(torch.nn.Module):
    """A layer and a function with a product."""

    def __init__(self):
        super().__init__()
        self.fc, self.weight = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return Multiplying.apply(self.fc(x), self.weight)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # the tracer's doing
def test_a_product_in_a_function_of_the_user_s_own_is_counted_and_named():
    (function,) = (op for op in qsync.capture(Multiplied(), torch.randn(3, 4)).ops if "function" in op.name)
    assert function.flops == 2 * 3 * 4 * 6
    assert function.fixed_because == "a torch.autograd.Function runs as it is written"

"""The variance indicator: by hand where that can be done, and against the truth."""

from __future__ import annotations

import itertools
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync import backend
from qsync.backend.encoding import Operand, decode, encode
from qsync.errors import CalibrationError
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.predictor.sensitivity.directional_probe import RESULT, STOCHASTIC, RoundingEffects, rounded_results
from qsync.predictor.sensitivity.rounding import (
    rounding_error,
    stochastic_convolution_errors,
    stochastic_errors,
)
from qsync.predictor.sensitivity.variance import indicator
from qsync.records.graph import Op, OpGraph
from qsync.runtime import planned_forward


class Counted(nn.Module):
    """Two linears around a GELU beside a residual, counting its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.dropout(self.second(F.gelu(self.first(x)))))


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batches(num: int = 2, rows: int = 32, width: int = 16) -> list[torch.Tensor]:
    return list(torch.randn(num, rows, width, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("type_name", ["int8_row", "fp8_row", "bf16", "tf32"])
def test_rounding_error_is_that_of_the_type(type_name):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    error = rounding_error(x, type_name)
    assert (
        0 < float(error.abs().max()) <= float(x.abs().max()) / {"tf32": 2048, "bf16": 256}.get(type_name, 16)
    )
    if type_name == "bf16":
        assert torch.equal(error, x.bfloat16().float() - x)
    assert rounding_error(torch.zeros(0, 4), type_name).shape == (0, 4)


@pytest.mark.parametrize("zeros", [0.0, 0.9])
def test_errors_of_stochastic_gradients_are_those_of_the_kernel(zeros):
    """Gradients that are zero in most rows add nothing there."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 48, generator=generator).requires_grad_() for n in (200, 64))
    g = torch.randn(200, 64, generator=generator) * (torch.rand(200, 1, generator=generator) >= zeros)
    kernel = backend.select("cpu").kernel("linear", Precision.INT8_ALL)
    operands = [Operand(t, encode(t.detach(), "int8_row")) for t in (x, w)]
    exact = (g @ decode(operands[1].encoded), g.T @ decode(operands[0].encoded))
    measured = torch.zeros(2)
    for _ in range(4):
        got = torch.autograd.grad(kernel(F.linear, "fp32", *operands), (x, w), g)
        measured += torch.stack([(a - b).square().sum() for a, b in zip(got, exact, strict=True)]) / 4
    dx, dw = stochastic_errors(g, x.detach(), w.detach())
    assert float(dx.sum()) == pytest.approx(float(measured[0]), rel=0.1)
    assert float(dw) == pytest.approx(float(measured[1]), rel=0.1)


@pytest.mark.parametrize(
    ("side", "window", "options"),
    [
        (9, 3, {"padding": 1}),
        (9, 3, {}),
        (8, 1, {}),
        (9, 3, {"stride": 2, "padding": 1}),
        (9, 2, {"stride": 2}),
    ],
)
def test_errors_of_stochastic_convolution_gradients_are_those_of_the_kernel(side, window, options):
    """Of pixels of unlike size: one scale per image and one per pixel add unlike variances."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 16, side, side, generator=generator).requires_grad_()
    w = torch.randn(24, 16, window, window, generator=generator).requires_grad_()
    shape = torch.conv2d(x, w, **options).shape
    g = (
        torch.randn(shape, generator=generator)
        * torch.randn(shape[0], 1, *shape[2:], generator=generator).exp()
    )
    kernel = backend.select("cpu").kernel("conv2d", Precision.INT8_ALL)
    operands = [Operand(t, encode(t.detach(), f"int8_{of}")) for t, of in ((x, "image"), (w, "channel"))]
    decoded = [decode(operand.encoded).requires_grad_() for operand in operands]
    exact = torch.autograd.grad(torch.conv2d(*decoded, **options), decoded, g)
    measured = torch.zeros(2)
    torch.manual_seed(1)
    for _ in range(64):
        got = torch.autograd.grad(kernel(torch.conv2d, "fp32", *operands, **options), (x, w), g)
        measured += torch.stack([(a - b).square().sum() for a, b in zip(got, exact, strict=True)]) / 64
    dx, dw = stochastic_convolution_errors(g, x.detach(), w.detach())
    assert dx.shape == x.shape
    assert float(dx.sum()) == pytest.approx(float(measured[0]), rel=0.1)
    assert float(dw) == pytest.approx(float(measured[1]), rel=0.1)


def graph_of(kind: str = "linear") -> OpGraph:
    op = Op("op", kind, Role.ADJUSTABLE, ("x", "w"), (), "fp32", (2, 2), 1, True, 0.0, 1)
    inputs = tuple(qsync.records.graph.Input(name, "parameter", "fp32", (2, 2), True) for name in ("x", "w"))
    return OpGraph("model", inputs, (op,))


def test_omega_is_the_sum_of_what_a_precision_rounds():
    values = {("op", 0, "bf16"): 1.0, ("op", 1, "bf16"): 2.0, ("op", RESULT, "bf16"): 4.0,
              ("op", 0, "int8_row"): 100.0, ("op", 1, "int8_row"): 200.0, ("gelu", RESULT, "bf16"): 8.0,
              ("op", 0, "tf32"): 0.5}  # fmt: skip
    gradients = {("op", RESULT, "bf16"): 16.0, ("op", 0, "bf16"): 32.0, ("gelu", RESULT, "bf16"): 64.0,
                 ("op", 0, STOCHASTIC): 1000.0, ("op", RESULT, "tf32"): 0.25}  # fmt: skip
    precisions = [Precision.TF32, Precision.BF16, Precision.INT8, Precision.INT8_ALL]
    narrow = {"op": ("op", "gelu")}
    assert indicator(graph_of(), RoundingEffects(values, gradients), precisions, narrow)["op"] == {
        "tf32": 0.5 + 0.25,
        "bf16": 1 + 2 + 4 + 8 + 16 + 32 + 64,
        "int8": 100 + 200 + 16 + 32,
        "int8_all": 100 + 200 + 1000,
    }
    attention = indicator(graph_of("attention"), RoundingEffects(values, gradients), [Precision.INT8], narrow)
    assert attention["op"] == {"int8": 100 + 200 + 4 + 16 + 32}


def test_an_operator_that_never_ran_adds_nothing():
    assert indicator(graph_of(), RoundingEffects({}, {}), [Precision.INT8], {}) == {"op": {"int8": 0.0}}


def test_following_operators_are_rounded_where_they_run_in_16_bits():
    graph = qsync.capture(Counted(), batches()[0])
    narrow = rounded_results(graph)
    assert [name.split(".")[-1] for name in narrow["first"]] == ["first", "gelu"]
    assert narrow["head"] == ("head",)


def test_two_steps_per_batch_and_one_look_at_the_numbers(monkeypatch):
    model, taken, looks = Counted(), SimpleQueue(), []  # a list would be put back

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        taken.put(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return squared(model, batch)

    for name in ("item", "tolist", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *a, f=original, n=name, **k: (looks.append(n), f(self, *a, **k))[1],
        )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    qsync.sensitivity(model, batches(3), loss)
    _, *passes = [taken.get() for _ in range(taken.qsize())]  # the first call is the model's own
    assert len(passes) == 2 * 3
    assert all(not torch.equal(here, there) for here, there in itertools.pairwise(passes))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert looks == ["tolist", "tolist"] * 3  # are the numbers finite, and the numbers


def test_a_seed_gives_the_same_numbers_and_leaves_random_states_alone():
    model = Counted()
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    first, again, other = (qsync.sensitivity(model, batches(), squared, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.rand(()), expected)
    assert first.omega == again.omega
    assert first.omega != other.omega


@pytest.mark.parametrize("precision", ["bf16", "int8", "int8_all"])
def test_it_says_how_large_the_true_error_is(precision):
    """On a smooth model, to within the draw of the probe: no weight to fit."""
    torch.manual_seed(0)
    widths = [64, 256, 32, 512, 64, 128, 10]
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    targets = torch.randint(0, 10, (128,))
    data = [torch.randn(128, 64) * torch.rand(128, 1).exp() for _ in range(4)]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch), targets)

    omega, truth = (
        qsync.sensitivity(model, data, loss, indicator=name, precisions=[precision]).omega
        for name in ("variance", "empirical")
    )
    for name, modes in truth.items():
        assert omega[name][precision] == pytest.approx(modes[precision], rel=0.5), name
    order, true_order = (sorted(found, key=lambda n: found[n][precision]) for found in (omega, truth))
    distance = sum((order.index(name) - true_order.index(name)) ** 2 for name in order)
    assert 1 - 6 * distance / (len(order) ** 3 - len(order)) >= 0.7  # six layers, some nearly alike


def test_an_embedding_s_error_is_felt_where_its_rows_are_looked_up():
    """A third of the rows, four times each; its table's gradient is added up in FP32."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(96, 64)
            self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, places: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.hidden(self.embedding(places))))

    targets = torch.arange(128) % 10

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch), targets)

    places = [torch.arange(128) * 5 % 32 + 3 * batch for batch in range(4)]
    omega, truth = (
        qsync.sensitivity(Model(), places, loss, indicator=name, precisions=["bf16", "int8"]).omega
        for name in ("variance", "empirical")
    )
    for precision in ("bf16", "int8"):
        found = omega["embedding"][precision]
        assert found == pytest.approx(truth["embedding"][precision], rel=0.5), precision
    assert rounded_results(qsync.capture(Model(), places[0]))["embedding"] == ()


def test_errors_that_rows_share_add_up():
    """Every row is the same: so is its rounding error, and the weight's gradient takes it that many times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    row = torch.randn(1, 64)
    targets = torch.randn(64, 64)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - targets).square().sum()

    found, truth = (
        qsync.sensitivity(model, [row.expand(64, 64)] * 4, loss, indicator=name, precisions=["int8"]).omega[
            "0"
        ]
        for name in ("variance", "empirical")
    )
    assert found["int8"] == pytest.approx(truth["int8"], rel=0.5)


def test_convolutions_products_and_shared_weights_are_felt():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).flatten(2).mT
            y = self.linear(self.linear(y))
            return torch.matmul(y, y.mT)

    torch.manual_seed(0)
    precisions = ["bf16", "int8", "int8_all"]
    sensitivity = qsync.sensitivity(Mixed(), [torch.randn(4, 1, 6, 6)], squared, precisions=precisions)
    assert set(sensitivity.omega) == {"conv", "linear", "linear#2", "matmul"}
    assert sensitivity.omega["conv"]["int8_all"] > sensitivity.omega["conv"]["int8"]
    assert all(omega > 0 for modes in sensitivity.omega.values() for omega in modes.values())


def test_more_bits_add_less_variance_for_every_operator():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    sensitivity = qsync.sensitivity(model, [torch.randn(64, 32)], squared)
    assert set(sensitivity.omega) == {"0", "2"}
    for modes in sensitivity.omega.values():
        assert 0 < modes["tf32"] < modes["fp16"] < modes["bf16"] < modes["int8"] < modes["int8_all"]


class Divided(nn.Module):
    """A layer whose result is divided behind a break of the trace, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.in_place = nn.Linear(16, 64), nn.Linear(64, 4), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        if self.in_place:
            hidden /= 3.0
        else:
            hidden = hidden / 3.0
        return self.head(torch.tanh(hidden))


def test_a_result_that_later_code_overwrites_has_the_effect_that_it_has_as_it_was():
    # of three dimensions: torch's register_hook ends the process where the base of a view was written to
    batch = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
    found = [qsync.sensitivity(Divided(in_place), [batch], squared).omega for in_place in (False, True)]
    assert found[0] == found[1]
    assert found[0]["first"]["int8"] > 0


class Phases(nn.Module):
    """A complex layer between real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.first(x) * self.turn).abs())


def test_complex_parameters_count_as_pairs_of_real_ones():
    model, batch = Phases(), batches(1)
    before = model.turn.detach().clone()
    found = qsync.sensitivity(model, batch, squared, precisions=["bf16"]).omega
    truth = qsync.sensitivity(model, batch, squared, precisions=["bf16"], indicator="empirical").omega
    assert torch.equal(model.turn, before)
    for op in ("first", "head"):
        assert truth[op]["bf16"] / 4 < found[op]["bf16"] < truth[op]["bf16"] * 4


class Stepped(nn.Module):
    """A layer that is called at times which change from one traced piece to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def slope(self, time: float, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x + time))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = 0.0
        while time < 1.0:
            x = x + self.slope(time, x)
            time += 0.25 if float(x.detach().abs().max()) >= 0 else 1.0
        return self.head(x)


def test_a_number_that_changes_within_the_step_gives_the_graph_that_is_planned_for():
    model, batch = Stepped(), batches(1)[0]
    found = qsync.sensitivity(model, [batch], squared, precisions=["bf16"])
    assert found.graph_hash == qsync.capture(model, batch).hash


def test_a_gradient_that_dies_within_the_model_is_an_error_that_says_where():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    nn.init.constant_(model[0].bias, -1e3)
    with pytest.raises(CalibrationError, match="^the gradient is zero everywhere, from 0 on; pass batches"):
        qsync.sensitivity(model, [torch.randn(8, 4)], squared)


def test_an_error_in_the_second_step_leaves_the_parameters_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before, calls = model[0].weight.detach().clone(), []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("gone")
        return model(batch).square().sum()

    with pytest.raises(RuntimeError, match="gone"):
        qsync.sensitivity(model, [torch.randn(8, 4)], loss)
    assert torch.equal(model[0].weight, before)
    assert model not in planned_forward.programs

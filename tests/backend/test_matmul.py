"""Batched INT8 products against the reference: shapes, strides, broadcasting, NaN and Inf; what is saved; in
models."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_calls import LEAST_DB, agreement_db, assert_parity, call, outcome, sample
from models import build, step
from observing import decibels, watched
from priced_nodes import priced

import qsync
from qsync.backend import decode, encode, select
from qsync.backend.encoding import memory_order
from qsync.lowering.lowered_graph import Run
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.runtime.planned_forward import program_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)

SHAPES = {
    "matrices": ((13, 37), (37, 11)),
    "a batch": ((4, 7, 5), (4, 5, 3)),
    "heads": ((2, 3, 9, 16), (2, 3, 16, 9)),
    "squares": ((2, 3, 16, 16), (2, 3, 16, 16)),  # scales of columns are as many as rows
    "one square B": ((8, 16), (16, 16)),
    "one B for all": ((2, 3, 7, 5), (5, 4)),
    "one A for all": ((7, 5), (3, 5, 4)),
    "broadcast": ((2, 1, 7, 5), (3, 5, 4)),
    "broadcast both": ((2, 1, 1, 5), (1, 3, 5, 1)),
    "vector times matrix": ((5,), (5, 4)),
    "vector times matrices": ((5,), (3, 5, 4)),
    "matrix times vector": ((6, 5), (5,)),
    "matrices times vector": ((3, 6, 5), (5,)),
    "vectors": ((9,), (9,)),
    "no rows": ((2, 0, 5), (2, 5, 3)),
    "no matrices": ((0, 4, 5), (0, 5, 3)),
    "ones": ((2, 1, 1), (2, 1, 1)),
}


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of this shape whose dimensions lie in memory in this order."""
    stored = sample(*(shape[d] for d in order), seed=seed)
    return stored.permute([order.index(d) for d in range(len(shape))])


@pytest.mark.parametrize("out_type", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_broadcasting(name, out_type):
    a, b = SHAPES[name]
    bounds = LEAST_DB["int8"] if out_type == "fp32" else (45, 40)
    tensors = [sample(*a), sample(*b, seed=1)]
    y, *_ = assert_parity("matmul", "int8", torch.matmul, tensors, bounds, out_type=out_type)
    assert y.shape == torch.matmul(*tensors).shape


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("inner", [1, 3, 8, 33])
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_sizes_that_products_could_leave_unwritten(rows, inner, columns):
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)):
        a, b = laid_out((2, rows, inner), order, 0), laid_out((2, inner, columns), order, 1)
        assert_parity("matmul", "int8", torch.bmm, [a, b])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_operands_are_encoded_in_the_order_in_which_they_lie(order):
    a, b = laid_out((2, 3, 6, 8), order, 0), laid_out((2, 3, 8, 5), order, 1)
    for x, layout, dim in ((a, "row", -1), (b, "inner", -2)):
        found = encode(x, f"int8_{layout}")
        assert found.data.stride() == x.stride()
        assert memory_order(found.scale) is not None
        expected = x.abs().amax(dim, keepdim=True) / 127
        assert torch.allclose(found.scale, expected, rtol=1e-6)
        assert ((decode(found) - x).abs() <= expected * 0.501).all()
    assert_parity("matmul", "int8", torch.matmul, [a, b])
    assert_parity("matmul", "int8", torch.matmul, [a[:, ::2, 1:], b[:, ::2, :, ::2]])


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e18])
def test_magnitudes_differ_between_matrices(scale):
    a, b = sample(3, 6, 8), sample(3, 8, 5, seed=1)
    a[1] *= scale
    y, *_ = assert_parity("matmul", "int8", torch.matmul, [a, b])
    exact = a @ b
    assert all(agreement_db(y[i], exact[i]) > 35 for i in range(3))


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_it_saves_the_codes_and_scales_that_its_gradients_need(frozen):
    tensors = [sample(2, 3, 16, 8), sample(2, 3, 8, 12, seed=1)]
    everything = outcome(select("cpu").kernel("matmul", "int8"), "matmul", "int8", torch.matmul, tensors)
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = call(select("cpu").kernel("matmul", "int8"), "matmul", "int8", torch.matmul, leaves)
    a_bytes, b_bytes = 6 * (16 * 8 + 4 * 16), 6 * (8 * 12 + 4 * 12)
    assert sum(saved) == (1 not in frozen) * a_bytes + (0 not in frozen) * b_bytes
    if len(frozen) < 2:
        y.backward(sample(*y.shape, seed=9))
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (i in frozen)
        assert leaf.grad is None or torch.equal(leaf.grad, everything[1 + i])


def test_a_shared_matrix_gets_one_gradient_summed_in_fp32():
    """A sum of many BF16 numbers would lose digits."""
    a, b = sample(64, 2, 4, 8), sample(1, 1, 8, 3, seed=1)
    _, _, db = assert_parity("matmul", "int8", torch.matmul, [a, b])
    assert db.shape == b.shape


def test_the_backward_of_devices_without_bf16_is_in_fp32(monkeypatch):
    from qsync.backend.kernels import matmul

    monkeypatch.setattr(matmul, "sixteen_bit_dtype", lambda device: torch.float16)
    tensors = [sample(2, 6, 8, scale=1e9), sample(2, 8, 5, seed=1)]
    assert_parity("matmul", "int8", torch.matmul, tensors)


# --- In models ---


class Attention(torch.nn.Module):
    """Attention written out, with a mask that reaches over heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(*x.shape[:2], 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape)).square().mean()


class Powers(torch.nn.Module):
    """A product of one value with itself, and one with a view of itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sum() + (x @ x.transpose(0, 1)).sum()


def test_what_runs_is_what_was_priced_and_close_to_fp32():
    model, x = Attention(), sample(2, 5, 16)
    graph = qsync.capture(model, x)
    products = [op.name for op in graph.adjustable if op.kind == "matmul"]
    assert len(products) == 2
    expected = {name: g.clone() for name, g in gradients_of(model, x).items()}
    for assignment in (dict.fromkeys(products, Precision.INT8), {products[1]: Precision.INT8}):
        watcher = watched(model, assignment)
        got = gradients_of(model, x)
        assert tuple(watcher.nodes) == priced(graph, assignment)
        assert not watcher.wrong
        assert decibels(got, expected) > 25


def gradients_of(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_one_value_in_both_places_stays_in_fp32():
    x = sample(4, 4)
    graph = qsync.capture(Powers(), x)
    assert [op.role for op in graph.ops if op.kind == "matmul"] == [Role.FIXED, Role.ADJUSTABLE]


def test_a_bert_with_written_out_attention_trains_in_int8():
    plain, batch = build("bert", dropout=0.0, attn_implementation="eager")
    model, _ = build("bert", dropout=0.0, attn_implementation="eager")
    loss, expected = step(plain, batch)
    qsync.wrap(model, "int8", strict=True)
    found, got = step(model, batch)
    assert float(found) == pytest.approx(float(loss), rel=0.02)
    assert decibels(got, expected) > 15
    runs = {
        run.op: run.mode for part in program_of(model).lowered for run in part.nodes if isinstance(run, Run)
    }
    assert [mode for op, mode in runs.items() if "matmul" in op] == ["int8"] * 4
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    losses: list[list[float]] = [[], []]
    for _ in range(20):
        for run, optimizer, one in zip(losses, optimizers, (plain, model), strict=True):
            run.append(float(step(one, batch)[0]))
            optimizer.step()
    assert losses[1][-1] < 0.5 * losses[1][0]
    assert math.isclose(losses[0][-1], losses[1][-1], abs_tol=0.1)

"""Batched INT8 products against the reference: shapes, strides, broadcasting, NaN and Inf; what is saved; in
models."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import assert_parity, call, outcome, sample

from qsync.backend import decode, encode, select
from qsync.backend.encoding import memory_order

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of this shape whose dimensions lie in memory in this order."""
    stored = sample(*(shape[d] for d in order), seed=seed)
    return stored.permute([order.index(d) for d in range(len(shape))])


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

"""INT8 attention against the reference: masks, dropout, groups, odd shapes, NaN and Inf; what is saved; in
models."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import agreement_db, assert_parity, call, outcome, sample
from torch import Tensor
from torch.nn import functional as F

from qsync.backend import reference_kernel, select
from qsync.backend.kernels.attention import attention_int8, attention_strategy
from qsync.operators.precision import Precision

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)

# Against the reference, which rounds the result's gradient and nothing else: BF16 weights of P V, and BF16
# gradients of weights and scores.
BOUNDS = (46, 40)
SHAPES = {
    "heads": [(2, 3, 9, 8)] * 3,
    "another length": [(2, 3, 9, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    "another width": [(2, 3, 9, 8), (2, 3, 9, 8), (2, 3, 9, 6)],
    "primes": [(1, 2, 13, 7), (1, 2, 11, 7), (1, 2, 11, 5)],
    "one head": [(3, 7, 4)] * 3,
    "no batch": [(7, 4)] * 3,
    "one token": [(2, 2, 1, 4)] * 3,
    "one key": [(2, 2, 5, 4), (2, 2, 1, 4), (2, 2, 1, 4)],
    "shared keys": [(2, 3, 9, 8), (1, 3, 9, 8), (1, 1, 9, 8)],
}
KERNEL = attention_int8.attention_int8


@pytest.fixture(autouse=True, params=["many keys", "few keys"])
def keys(request, monkeypatch):
    """Run the kernel for many keys, then the one that few keys run."""
    if request.param == "many keys":
        monkeypatch.setattr(attention_int8, "saves_weights", lambda *_: False)


def qkv(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [sample(*shape, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 1.5}], ids=str)
def test_shapes(name, options):
    tensors = qkv(SHAPES[name])
    y, *_ = assert_parity("attention", "int8", F.scaled_dot_product_attention, tensors, BOUNDS, **options)
    assert y.shape == F.scaled_dot_product_attention(*tensors).shape


@pytest.mark.parametrize("at_a_time", [1, 100, 250])
def test_a_few_heads_at_a_time_are_all_heads(monkeypatch, at_a_time):
    monkeypatch.setattr(attention_int8, "scores_per_block", lambda device: at_a_time)
    mask = sample(2, 1, 9, 9, seed=4)
    assert_parity(
        "attention", "int8", F.scaled_dot_product_attention, [*qkv([(2, 3, 9, 8)] * 3), mask], BOUNDS
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries_share_keys_and_values(groups):
    tensors = qkv([(2, 4, 6, 8), (2, 4 // groups, 6, 8), (2, 4 // groups, 6, 8)])
    assert_parity(
        "attention", "int8", F.scaled_dot_product_attention, tensors, BOUNDS, enable_gqa=True, is_causal=True
    )


MASKS = [(9, 9), (1, 9), (2, 1, 1, 9), (1, 3, 9, 9), (2, 3, 9, 9), (3, 1, 9)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_numbers_get_their_gradients(shape):
    tensors = [*qkv([(2, 3, 9, 8)] * 3), sample(*shape, seed=4)]
    assert_parity("attention", "int8", F.scaled_dot_product_attention, tensors, BOUNDS)


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_bools_hide_keys_and_may_hide_all_of_them(shape):
    mask = sample(*shape, seed=4) > 0
    mask.view(-1, 9)[0] = False
    tensors = qkv([(2, 3, 9, 8)] * 3)
    y, *_ = assert_parity(
        "attention", "int8", F.scaled_dot_product_attention, tensors, BOUNDS, attn_mask=mask
    )
    hidden = ~mask.expand(2, 3, 9, 9).any(-1)
    assert hidden.any()
    assert torch.equal(y[hidden], torch.zeros_like(y[hidden]))


def test_dropout_drops_what_torch_drops():
    tensors = qkv([(2, 3, 9, 8)] * 3)
    gradient = sample(2, 3, 9, 8, seed=9)
    found = []
    for kernel in (select("cpu").kernel("attention", "int8"), reference_kernel("attention", Precision.INT8)):
        torch.manual_seed(3)
        target = F.scaled_dot_product_attention
        found.append(outcome(kernel, "attention", "int8", target, tensors, gradient, dropout_p=0.4))
        found[-1] = (*found[-1], torch.rand(3))
    *got, after = found[0]
    *expected, expected_after = found[1]
    assert torch.equal(after, expected_after)  # as many random numbers were drawn
    assert all(agreement_db(a, b) > 40 for a, b in zip(got, expected, strict=True))


def test_bf16_values_and_results():
    tensors = [t.bfloat16() for t in qkv([(2, 3, 9, 8)] * 3)]
    results = assert_parity(
        "attention", "int8", F.scaled_dot_product_attention, tensors, (40, 38), out_type="bf16"
    )
    assert all(t.dtype is torch.bfloat16 for t in results)


def test_the_result_lies_as_models_ask_for_it():
    """Heads beside each other: what follows is a view."""
    q, k, v = (t.transpose(1, 2) for t in qkv([(2, 9, 3, 8)] * 3))
    y = call(KERNEL, "attention", "int8", F.scaled_dot_product_attention, [q, k, v])
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_comes_out_where_it_belongs(bad, where):
    tensors = qkv([(2, 3, 9, 8)] * 3)
    tensors[where][1, 2, 3, 4] = bad
    for options in ({}, {"attn_mask": torch.ones(9, 9, dtype=torch.bool)}):
        target = F.scaled_dot_product_attention
        y, *gradients = outcome(KERNEL, "attention", "int8", target, tensors, **options)
        assert y[1, 2, 3].isnan().all()
        assert y[0].isfinite().all() and y[1, :2].isfinite().all()
        assert any(not g[1, 2].isfinite().all() for g in gradients)


@pytest.mark.parametrize(
    ("length", "case", "more"),
    [
        (80, "plain", 0),
        (80, "mask", 6400),
        (16, "dropout", 6 * 256),
    ],
)
def test_it_saves_codes_and_scales_and_a_byte_per_dropped_score(length, case, more):
    saved = saved_bytes(length, case)
    assert saved == 3 * 6 * (length * 8 + 4 * length) + more


@pytest.mark.parametrize("case", ["plain", "mask"])
def test_few_keys_save_their_weights_and_no_mask(monkeypatch, case):
    monkeypatch.setattr(attention_int8, "saves_weights", attention_strategy.saves_weights)
    assert saved_bytes(16, case) == 3 * 6 * (16 * 8 + 4 * 16) + 2 * 6 * 256


def saved_bytes(length: int, case: str) -> int:
    tensors = [t.requires_grad_() for t in qkv([(2, 3, length, 8)] * 3)]
    mask = torch.ones(length, length, dtype=torch.bool)
    options = {"mask": {"attn_mask": mask}, "dropout": {"dropout_p": 0.1}}
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        target = F.scaled_dot_product_attention
        call(KERNEL, "attention", "int8", target, tensors, **options.get(case, {}))
    return sum(saved)


def test_frozen_operands_get_no_gradient():
    tensors = qkv([(2, 3, 9, 8)] * 3)
    tensors[0].requires_grad_()
    y = call(KERNEL, "attention", "int8", F.scaled_dot_product_attention, tensors)
    y.sum().backward()
    assert tensors[0].grad is not None and tensors[1].grad is None


# --- In models ---

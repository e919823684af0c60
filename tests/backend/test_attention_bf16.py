"""BF16 attention on CPUs against the reference: masks, dropout, groups, pieces; what is saved."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import agreement_db, assert_parity, sample
from torch import Tensor
from torch.nn import functional as F

from qsync.backend import reference_kernel
from qsync.backend.casts import cast_ops
from qsync.backend.kernels.attention import attention_bf16, attention_strategy, softmax
from qsync.backend.selection.kernel_candidates import candidates
from qsync.operators.precision import Precision

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)
ATTENTION = F.scaled_dot_product_attention
HEADS = [(2, 3, 9, 8)] * 3
# BF16 weights of P V, and BF16 gradients of weights and scores, less sums from a BF16 result. The worst are a
# few keys with large scores.
BOUNDS = (45, 35)


@pytest.fixture(autouse=True, params=["compiled", "plain", "few keys"])
def passes(request, monkeypatch):
    """Run the kernel for many keys in both forms, then the one that few keys run."""
    if request.param == "few keys":
        return
    monkeypatch.setattr(attention_bf16, "saves_weights", lambda *_: False)
    if request.param == "plain":
        monkeypatch.setattr(softmax, "compiled_for", lambda *_: None)
    elif cast_ops.compiled_for("softmax", torch.zeros(1, 1, 1, dtype=torch.bfloat16)) is None:
        pytest.skip("nothing compiles here")


def leaves(shapes, seed=0) -> list[Tensor]:
    return [sample(*shape, seed=seed + i).bfloat16().requires_grad_() for i, shape in enumerate(shapes)]


def outcome(kernel, tensors, options) -> list[Tensor]:
    mine = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    y = kernel(ATTENTION, "bf16", *mine, **options)
    wanted = [t for t in mine if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, sample(*y.shape, seed=9).bfloat16())]


def assert_as_reference(tensors, **options) -> list[Tensor]:
    got = outcome(attention_bf16.attention_bf16, tensors, options)
    expected = outcome(reference_kernel("attention", Precision.BF16), tensors, options)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert agreement_db(a, b) >= BOUNDS[min(i, 1)], f"tensor {i}"
    return got


@pytest.mark.parametrize(
    "shapes",
    [
        [(7, 4)] * 3,
        [(3, 7, 4)] * 3,
        [(2, 3, 9, 8), (2, 3, 5, 8), (2, 3, 5, 6)],
        [(2, 3, 9, 8), (1, 3, 9, 8), (1, 1, 9, 8)],
        [(1, 2, 300, 8)] * 3,
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 1.5}], ids=str)
def test_shapes(shapes, options):
    assert_as_reference(leaves(shapes), **options)


def test_another_default_type_changes_nothing():
    tensors, gradient = leaves(HEADS), sample(*HEADS[0], seed=9).bfloat16()

    def found() -> list[Tensor]:
        y = attention_bf16.attention_bf16(ATTENTION, "bf16", *tensors, is_causal=True)
        return [y.detach(), *torch.autograd.grad(y, tensors, gradient)]

    expected = found()
    torch.set_default_dtype(torch.float64)
    try:
        got = found()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("at_a_time", [1, 40, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_pieces_are_the_whole(monkeypatch, at_a_time, causal):
    monkeypatch.setattr(attention_bf16, "SCORES_PER_BLOCK", at_a_time)
    monkeypatch.setattr(attention_bf16, "_CAUSAL_ROWS", 4)
    mask = None if causal else sample(2, 1, 9, 9, seed=4).bfloat16()
    assert_as_reference(leaves(HEADS), is_causal=causal, attn_mask=mask)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries_share_keys_and_values(groups):
    shared = (2, 4 // groups, 6, 8)
    assert_as_reference(leaves([(2, 4, 6, 8), shared, shared]), enable_gqa=True, is_causal=True)


MASKS = [(9, 9), (1, 9), (2, 1, 1, 9), (1, 3, 9, 9), (2, 3, 9, 9), (3, 1, 9)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_numbers_get_their_gradients_and_masks_of_bools_hide(shape):
    assert_as_reference(leaves([*HEADS, shape]))
    bools = sample(*shape, seed=4) > 0
    bools.view(-1, 9)[0] = False
    hidden = ~bools.expand(2, 3, 9, 9).any(-1)
    assert hidden.any()
    for mask in (bools, torch.zeros(shape, dtype=torch.bfloat16).masked_fill(~bools, -torch.inf)):
        y, *gradients = assert_as_reference(leaves(HEADS), attn_mask=mask)
        assert torch.equal(y[hidden], torch.zeros_like(y[hidden]))
        assert torch.equal(gradients[0][hidden], torch.zeros_like(y[hidden]))


def test_scores_have_more_than_eight_bits():
    """Scores of 100: to BF16's own 2^-9 they would be wrong by 0.2, and weights by a fifth."""
    q, k, v = leaves([(1, 1, 64, 64)] * 3)
    tensors = [(t.detach() * 10).requires_grad_() for t in (q, k)] + [v]
    y = attention_bf16.attention_bf16(ATTENTION, "fp32", *tensors)
    assert agreement_db(y, ATTENTION(*(t.float() for t in tensors))) > 45


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_drops_what_torch_drops(monkeypatch, causal):
    monkeypatch.setattr(attention_bf16, "SCORES_PER_BLOCK", 100)
    monkeypatch.setattr(attention_bf16, "_CAUSAL_ROWS", 4)
    found = []
    for kernel in (attention_bf16.attention_bf16, reference_kernel("attention", Precision.BF16)):
        torch.manual_seed(3)
        options = {"dropout_p": 0.4, "is_causal": causal}
        found.append((outcome(kernel, leaves(HEADS), options), torch.rand(3)))
    (got, after), (expected, expected_after) = found
    assert torch.equal(after, expected_after)  # as many random numbers were drawn
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert agreement_db(a, b) > BOUNDS[min(i, 1)], f"tensor {i}"


def test_dropout_of_everything():
    y, *gradients = outcome(attention_bf16.attention_bf16, leaves(HEADS), {"dropout_p": 1.0})
    assert not any(t.any() for t in (y, *gradients))


def test_it_saves_what_torch_saves_and_a_byte_per_dropped_score():
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        mask = torch.ones(16, 16, dtype=torch.bool)
        attention_bf16.attention_bf16(ATTENTION, "bf16", *leaves([(2, 3, 16, 8)] * 3), mask, dropout_p=0.1)
    assert sum(saved) == 4 * 6 * 16 * 8 * 2 + 6 * 16 * 4 + 16 * 16 * 2 + 6 * 16 * 16


def test_few_keys_save_their_weights_in_the_place_of_the_result(monkeypatch):
    monkeypatch.setattr(attention_bf16, "saves_weights", attention_strategy.saves_weights)
    for keys, more in ((64, 2 * 6 * 16 * 64), (65, 2 * 6 * 16 * 8 + 4 * 6 * 16)):
        saved: list[int] = []
        operands = leaves([(2, 3, 16, 8), (2, 3, keys, 8), (2, 3, keys, 8)])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):  # noqa: B023
            attention_bf16.attention_bf16(ATTENTION, "bf16", *operands)
        assert sum(saved) == sum(t.nbytes for t in operands) + more


@pytest.mark.parametrize("shapes", [[(0, 3, 9, 8)] * 3, [(2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)]], ids=str)
def test_nothing_comes_of_nothing(shapes):
    got = outcome(attention_bf16.attention_bf16, leaves(shapes), {})
    assert [t.shape for t in got] == [shapes[0], *shapes]
    assert all(not t.any() for t in got)


def test_the_result_lies_as_models_ask_for_it():
    q, k, v = (t.transpose(1, 2) for t in leaves([(2, 9, 3, 8)] * 3))
    assert attention_bf16.attention_bf16(ATTENTION, "bf16", q, k, v).transpose(1, 2).is_contiguous()


def test_a_cpu_may_choose_it():
    names = [c.name for c in candidates("attention", Precision.BF16, torch.device("cpu"))]
    assert names == ["products in pieces, or torch"]
    assert_parity("attention", "bf16", ATTENTION, [t.detach().float() for t in leaves(HEADS)], BOUNDS)


@pytest.mark.parametrize("torch_is_faster", [True, False])
def test_long_sequences_run_the_kernel_that_was_faster(monkeypatch, torch_is_faster):
    asked = []

    def timed(keys, width, is_causal, trains, threads):
        asked.append((keys, trains))
        return torch_is_faster

    monkeypatch.setattr(attention_bf16, "_torch_is_faster", timed)
    ran = []

    def attend(*args, **kwargs):
        ran.append(args[1].shape[-2])
        return ATTENTION(*args, **kwargs)

    for keys, dropout in ((128, 0.0), (129, 0.0), (300, 0.0), (300, 0.1)):
        q, k, v = (torch.randn(1, 2, keys, 16).bfloat16().requires_grad_() for _ in range(3))
        got = attention_bf16.fastest_attention_bf16(attend, "bf16", q, k, v, dropout_p=dropout)
        if not dropout:
            assert (got.float() - ATTENTION(q, k, v).float()).norm() < 0.02 * got.float().norm()
    assert asked == [(256, True), (512, True)] and ran == ([129, 300] if torch_is_faster else [])
    ran.clear()
    with torch.no_grad():  # nothing is saved for backward: torch's kernel may be faster for few keys, too
        attention_bf16.fastest_attention_bf16(attend, "bf16", *(t[..., :100, :] for t in (q, k, v)))
    assert asked[2:] == [(128, False)] and ran == ([100] if torch_is_faster else [])


@pytest.mark.parametrize(
    "case", ["three dimensions", "five dimensions", "narrow values", "a trained mask", "a mask a batch"]
)
def test_what_torch_has_no_fused_kernel_for_is_not_handed_to_it(monkeypatch, case):
    """Its plain kernel would save all scores, in FP32."""
    monkeypatch.setattr(attention_bf16, "_torch_is_faster", lambda *_: True)
    lead = {"three dimensions": (4,), "five dimensions": (1, 2, 2)}.get(case, (2, 2))
    shapes = [(*lead, 300, 16)] * 2 + [(*lead, 300, 8 if case == "narrow values" else 16)]
    masks = {"a trained mask": torch.randn(1, 2, 300, 300), "a mask a batch": torch.randn(2, 300, 300)}
    mask = masks.get(case)
    if case == "a trained mask":
        mask.requires_grad_()

    def attend(*args, **kwargs):
        raise AssertionError("torch's kernel ran")

    q, k, v = leaves(shapes)
    got = attention_bf16.fastest_attention_bf16(attend, "bf16", q, k, v, attn_mask=mask)
    expected = ATTENTION(q, k, v, attn_mask=mask)
    assert (got.float() - expected.float()).norm() < 0.02 * expected.float().norm()


def test_a_head_of_keys_that_broadcasts_is_handed_to_torch_as_a_group(monkeypatch):
    monkeypatch.setattr(attention_bf16, "_torch_is_faster", lambda *_: True)
    grouped = []

    def attend(*args, **kwargs):
        grouped.append(kwargs["enable_gqa"])
        return ATTENTION(*args, **kwargs)

    for heads, values in ((1, 1), (4, 4), (1, 4)):
        q, k, v = leaves([(2, 4, 300, 8), (2, heads, 300, 8), (2, values, 300, 8)])
        got = outcome(lambda _, *rest: attention_bf16.fastest_attention_bf16(attend, *rest), (q, k, v), {})
        expected = outcome(reference_kernel("attention", Precision.BF16), (q, k, v), {})
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.shape == b.shape and agreement_db(a, b) >= BOUNDS[min(i, 1)], f"tensor {i}"
    assert grouped == [True, False, False]


def test_timing_kernels_leaves_random_numbers_and_gradients_as_they_were():
    attention_bf16._torch_is_faster.cache_clear()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for trains in (True, False):
            assert isinstance(attention_bf16._torch_is_faster(256, 16, True, trains, 1), bool)
        assert torch.equal(torch.rand(1), expected) and not torch.is_grad_enabled()

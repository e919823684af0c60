"""Forms that save less: the same result bit for bit, the gradient within its bound, and the bytes that are
kept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from qsync.backend.compressed_saves.activation_slopes import (
    decode_derivative,
    derivative_codes,
    derivative_from_output,
    minimum,
)
from qsync.backend.compressed_saves.bitmask import pack_bits, unpack_bits
from qsync.backend.compressed_saves.saved_ops import saving
from qsync.errors import UnsupportedError
from qsync.experiments.harness.measured_memory import saved_bytes

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def batch_norm(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, True)


# Form -> the call, its arguments for an input, and how far a gradient may be from torch's (relative, L2) when
# the operator runs in FP32 and in BF16. The rounding of a BF16 gradient alone is 0.002.
CASES = {
    ("gelu", "output"): (F.gelu, {}, 1e-4, 0.01),
    ("gelu", "codes"): (F.gelu, {}, 4e-3, 6e-3),
    ("silu", "codes"): (F.silu, {}, 4e-3, 6e-3),
    ("layer_norm", "output"): (F.layer_norm, {}, 2e-6, 0.03),
    ("layer_norm", "codes"): (F.layer_norm, {}, 0.02, 0.04),
    ("batch_norm", "codes"): (F.batch_norm, {}, 0.03, 0.04),
    ("softmax", "codes"): (F.softmax, {"dim": -1}, 0.01, 0.02),
    ("relu", "bits"): (F.relu, {}, 0.0, 0.0),
    ("dropout", "bits"): (F.dropout, {"p": 0.3}, 0.0, 0.0),
}
SHAPES = [(64, 48), (1, 7), (3, 5, 17), (2, 3, 5, 4), (0, 8)]


def arguments(kind: str, x: torch.Tensor) -> list[object]:
    """The input and what stands behind it in the call, with parameters that differ from their start."""
    if kind == "layer_norm":
        size = x.shape[-1]
        return [x, (size,), 1 + 0.2 * sample(size, seed=1), 0.2 * sample(size, seed=2)]
    if kind == "batch_norm":
        size = x.shape[1]
        return [x, None, None, 1 + 0.2 * sample(size, seed=1), 0.2 * sample(size, seed=2), True]
    return [x]


def outcome(call, args, options) -> list[torch.Tensor]:
    """Result and gradients, from the same random numbers."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    torch.manual_seed(7)
    y = call(*leaves, **options)
    gradient = sample(*y.shape, seed=9).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, tensors, gradient)]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.double().norm().item()
    difference = (got.double() - expected.double()).norm().item()
    return difference / norm if norm else difference


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("kind", "form", "shape"),
    # Batch norm of one row, or of none, has no statistics.
    [(*key, shape) for key in CASES for shape in SHAPES if key[0] != "batch_norm" or len(shape) > 2],
)
def test_the_result_is_torch_s_and_the_gradient_within_its_bound(kind, form, shape, dtype):
    target, options, exact, narrow = CASES[kind, form]
    args = arguments(kind, sample(*shape, dtype=dtype))
    expected = outcome(target, args, options)
    got = outcome(lambda *a, **k: saving(kind, form)(target, *a, **k), args, options)
    assert torch.equal(got[0], expected[0])
    for one, two in zip(got[1:], expected[1:], strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
    # A single row of seven has little to average over.
    slack = 3 if shape == (1, 7) else 1
    for one, two in zip(got[1:], expected[1:], strict=True):
        assert distance(one, two) <= slack * (exact if dtype is FP32 else narrow)


@pytest.mark.parametrize(("kind", "form"), [key for key in CASES if key[0] != "layer_norm"])
def test_channels_last_stays_channels_last(kind, form):
    target, options, bound, _ = CASES[kind, form]
    x = sample(3, 6, 5, 4).to(memory_format=torch.channels_last)
    args = arguments(kind, x)
    expected = outcome(target, args, options)
    got = outcome(lambda *a, **k: saving(kind, form)(target, *a, **k), args, options)
    assert torch.equal(got[0], expected[0]) and got[0].stride() == expected[0].stride()
    assert distance(got[1], expected[1]) <= bound


@pytest.mark.parametrize(
    "call",
    [
        lambda x: saving("relu", "bits")(F.relu, x),
        lambda x: saving("layer_norm", "output")(F.layer_norm, x, (6,)),
        lambda x: saving("layer_norm", "output")(F.layer_norm, x, (3, 6)),
        lambda x: saving("layer_norm", "output")(F.layer_norm, x, (6,), x[0, 0] + 3, x[0, 1]),
        lambda x: saving("layer_norm", "output")(F.layer_norm, x, (6,), None, x[0, 1]),
        lambda x: saving("layer_norm", "output")(F.layer_norm, x, (6,), x[0, 0] + 3),
    ],
)
def test_what_is_exact_is_the_derivative(call):
    assert torch.autograd.gradcheck(call, sample(2, 3, 6, dtype=FP64).requires_grad_())


def test_a_dropout_mask_is_the_derivative():
    def call(x):
        torch.manual_seed(3)
        return saving("dropout", "bits")(F.dropout, x, 0.4)

    assert torch.autograd.gradcheck(call, sample(4, 9, dtype=FP64).requires_grad_())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_s_derivative_without_its_input(approximate):
    """The bounds that the docstrings state, on every thousandth of [-12, 12]."""
    x = torch.linspace(-12, 12, 24001, dtype=FP64)
    slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
    y = F.gelu(x, approximate=approximate)
    right = (x >= minimum(approximate)[0]).double()
    for dtype, bound in ((FP64, 3e-4), (FP32, 5e-4), (BF16, 0.03)):
        found = derivative_from_output(y.to(dtype), right.clone(), approximate)
        assert (found - slope).abs().max() < bound
    codes = derivative_codes(x.float(), approximate)
    assert (decode_derivative(codes, torch.ones_like(x)) - slope).abs().max() < 0.0025


def test_silu_s_derivative_from_its_codes():
    x = torch.linspace(-12, 12, 24001)
    slope = torch.ops.aten.silu_backward(torch.ones_like(x), x)
    found = decode_derivative(derivative_codes(x, "silu"), torch.ones_like(x))
    assert (found - slope).abs().max() < 0.0025


def test_the_minimum_of_gelu_is_where_its_derivative_vanishes():
    for approximate in ("none", "tanh"):
        at, least = (torch.tensor(value, dtype=FP64) for value in minimum(approximate))
        assert F.gelu(at, approximate=approximate) == pytest.approx(least.item(), abs=1e-15)
        one = torch.ones((), dtype=FP64)
        assert abs(torch.ops.aten.gelu_backward(one, at, approximate=approximate)) < 1e-7


@pytest.mark.parametrize(
    ("kind", "form", "kept"),
    [
        ("gelu", "output", 4 * 640 + 80),  # its result, which the next product keeps too, and a bit
        ("gelu", "codes", 640),
        ("silu", "codes", 640),
        ("layer_norm", "output", 4 * 640 + 4 * 10),  # and the deviation of every row
        ("layer_norm", "codes", 640 + (4 + 4) * 10),
        ("softmax", "codes", 640 + 4 * 10),
        ("relu", "bits", 80),
        ("dropout", "bits", 80),
    ],
)
def test_bytes_kept(kind, form, kept):
    target, options, _, _ = CASES[kind, form]
    args = arguments(kind, sample(10, 64).requires_grad_())
    parameters = [a for a in args[1:] if isinstance(a, torch.Tensor)]
    assert saved_bytes(lambda: saving(kind, form)(target, *args, **options), parameters) == kept


def test_bytes_kept_by_batch_norm():
    x = sample(4, 3, 8, 8).requires_grad_()
    parameters = [torch.ones(3), torch.zeros(3)]
    kept = saved_bytes(
        lambda: saving("batch_norm", "codes")(F.batch_norm, x, None, None, *parameters, True), parameters
    )
    assert kept == x.numel() + 4 * 4 + 4 * 3  # codes, a scale per sample, a deviation per channel


def test_running_statistics_move_as_torch_s_do():
    def moved(run):
        mean, var = torch.zeros(3), torch.ones(3)
        run(sample(4, 3, 8, 8).requires_grad_(), mean, var, None, None, True, 0.1)
        return mean, var

    expected = moved(F.batch_norm)
    got = moved(lambda *a: saving("batch_norm", "codes")(F.batch_norm, *a))
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


def test_both_spellings_of_batch_norm():
    x, weight, bias = sample(4, 3, 8, 8), sample(3, seed=1), sample(3, seed=2)
    run = saving("batch_norm", "codes")
    leaf = x.clone().requires_grad_()
    expected = F.batch_norm(x, None, None, weight, bias, training=True)
    got = run(torch.batch_norm, leaf, weight, bias, None, None, True, 0.1, 1e-5, False)
    assert torch.equal(got, expected) and "BatchNorm" in type(got.grad_fn).__name__
    assert torch.equal(run(F.batch_norm, leaf, None, None, weight, bias, training=True), expected)


@pytest.mark.parametrize("weight", [0.0, 1e-6])
def test_a_weight_near_zero_makes_layer_norm_keep_codes(weight):
    """(y - b) / w would then say nothing of x."""
    args = arguments("layer_norm", sample(16, 24))
    args[2][5] = weight
    expected = outcome(layer_norm, [args[0], *args[2:]], {})
    run = saving("layer_norm", "output")
    got = outcome(lambda x, w, b: run(F.layer_norm, x, (24,), w, b), [args[0], *args[2:]], {})
    assert max(distance(one, two) for one, two in zip(got, expected, strict=True)) < 0.02
    args[0].requires_grad_()
    kept = saved_bytes(lambda: run(F.layer_norm, *args), [args[2], args[3]])
    assert kept == args[0].numel() + 8 * 16


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", ["output", "codes"])
def test_a_layer_norm_with_a_bias_alone(form, dtype):
    """The gradients are those of FP32; torch itself has none for BF16 values beside an FP32 bias."""
    x, bias = sample(16, 24, dtype=dtype), sample(24, seed=2)
    expected = outcome(lambda x, b: F.layer_norm(x, (24,), None, b), [x.float(), bias], {})
    got = outcome(lambda x, b: saving("layer_norm", form)(F.layer_norm, x, (24,), None, b), [x, bias], {})
    assert [t.dtype for t in got] == [dtype, dtype, FP32]
    assert torch.equal(got[0], F.layer_norm(x, (24,), None, bias))
    bound = CASES["layer_norm", form][2 if dtype is FP32 else 3]
    assert max(distance(one, two) for one, two in zip(got, expected, strict=True)) <= bound


@pytest.mark.parametrize(
    ("dtype", "largest", "is_kept"),
    [(FP32, 1e6, False), (BF16, 8.0, False), (FP32, 8.0, True), (BF16, 1.0, True)],
)
def test_a_large_bias_alone_makes_layer_norm_keep_codes(dtype, largest, is_kept):
    """y - b would then have lost x."""
    x, bias = sample(16, 24, dtype=dtype).requires_grad_(), sample(24, seed=2).clamp_(-1, 1)
    bias[5] = largest
    kept = saved_bytes(lambda: saving("layer_norm", "output")(F.layer_norm, x, (24,), None, bias), [bias])
    assert kept == (x.numel() * x.element_size() + 4 * 16 if is_kept else x.numel() + 8 * 16)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_without_a_gradient_it_is_the_traced_call(kind, form):
    target, options, _, _ = CASES[kind, form]
    seen = []

    def traced(*args, **kwargs):
        seen.append(kind)
        return target(*args, **kwargs)

    args = arguments(kind, sample(2, 3, 4, 4))
    assert not saving(kind, form)(traced, *args, **options).requires_grad
    with torch.no_grad():
        saving(kind, form)(traced, args[0].requires_grad_(), *args[1:], **options)
    assert len(seen) == 2


@pytest.mark.parametrize("p", [0.0, 0.15, 0.5, 1.0])
def test_dropout_draws_what_torch_draws(p):
    """Also where 1 / (1 - p) has two roundings, and in evaluation."""
    x = sample(1001).requires_grad_()
    for training in (True, False):
        torch.manual_seed(0)
        expected = F.dropout(x, p, training)
        torch.manual_seed(0)
        got = saving("dropout", "bits")(F.dropout, x, p, training)
        assert torch.equal(got, expected)
        ones = torch.ones_like(x)
        gradients = [torch.autograd.grad(y, x, ones)[0] for y in (got + 0, expected + 0)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_reach_the_result_and_break_nothing(kind, form, odd):
    target, options, _, _ = CASES[kind, form]
    x = sample(2, 3, 4, 4)
    x[0, 1, 2, 3] = odd
    args = arguments(kind, x)
    expected = outcome(target, args, options)[0]
    got = outcome(lambda *a, **k: saving(kind, form)(target, *a, **k), args, options)
    assert torch.equal(got[0].nan_to_num(1e3), expected.nan_to_num(1e3))
    if kind == "relu":
        assert torch.equal(got[1], outcome(target, args, options)[1])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_bits_come_back(size):
    mask = sample(size) > 0
    bits = pack_bits(mask)
    assert bits.dtype is torch.uint8 and bits.numel() == math.ceil(size / 8)
    assert torch.equal(unpack_bits(bits, mask, FP32), mask.float())


def test_bits_come_back_from_channels_last():
    mask = (sample(2, 3, 5, 7) > 0).to(memory_format=torch.channels_last)
    again = unpack_bits(pack_bits(mask), mask, BF16)
    assert torch.equal(again, mask.bfloat16()) and again.stride() == mask.stride()


def test_a_form_that_a_kind_does_not_have_is_refused():
    with pytest.raises(
        UnsupportedError, match="softmax cannot save 'bits' for backward: leave out save_less"
    ):
        saving("softmax", "bits")


def test_softmax_along_any_dimension():
    x = sample(4, 6, 5).requires_grad_()
    g = sample(4, 6, 5, seed=1)
    for dim in (0, 1, -1):
        got = torch.autograd.grad(saving("softmax", "codes")(torch.softmax, x, dim), x, g)[0]
        assert distance(got, torch.autograd.grad(torch.softmax(x, dim), x, g)[0]) < 0.01
